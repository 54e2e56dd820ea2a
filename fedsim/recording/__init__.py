"""Reads and writes observations and ground truth on disk."""
