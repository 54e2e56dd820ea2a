"""Loads data sources, deals them to clients, and draws batches."""
