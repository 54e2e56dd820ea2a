"""Images from features that a head gave away."""
