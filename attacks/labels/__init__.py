"""Labels from the gradient of the last layer."""
