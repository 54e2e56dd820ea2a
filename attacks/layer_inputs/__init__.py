"""Recover what went into a layer from the row space of its gradient, with nothing planted."""
