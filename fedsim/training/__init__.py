"""Computes what one defense stack's federation does in each round, without Flower."""
