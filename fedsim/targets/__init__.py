"""Defines what leaks, one file a kind: images, features, labels, records, rows, membership."""
