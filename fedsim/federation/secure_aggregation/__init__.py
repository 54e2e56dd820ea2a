"""Secure aggregation as a protocol: masks, shares, and two sides that know nothing of Flower."""
