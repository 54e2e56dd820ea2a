"""Features of a batch from the gradient of a classifier's head."""
