"""Curves of normal distributions, special functions, integrals and root finders."""
