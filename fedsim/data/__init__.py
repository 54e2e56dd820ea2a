"""Data sources, how they are dealt to clients, and how batches are drawn."""
