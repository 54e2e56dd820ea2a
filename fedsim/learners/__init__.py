"""Computes what clients release of their data, by training or in closed form."""
