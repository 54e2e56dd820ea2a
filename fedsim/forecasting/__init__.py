"""What attacks will gain, told from a plan before any of them runs: indicators, a gain, a verdict."""
