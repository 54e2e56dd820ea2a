"""Observations and ground truth on disk."""
