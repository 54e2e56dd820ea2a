"""Reads and writes observations and truth on disk."""
