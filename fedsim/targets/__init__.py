"""What leaks, one file a kind: images, features, labels, rows, membership."""
