"""What attacks will gain, told before any of them runs: indicators, a gain, a verdict."""
