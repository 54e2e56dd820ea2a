"""The lines that a run leaves behind, and how they survive a kill."""
