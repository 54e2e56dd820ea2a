"""Builds, writes and reads the lines that a run leaves behind, which survive a kill."""
