"""Defines architectures, their heads, and local training as a pure function."""
