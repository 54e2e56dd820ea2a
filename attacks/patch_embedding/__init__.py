"""Images from the first layers of vision transformers."""
