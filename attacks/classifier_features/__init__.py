"""Recover features from an ordinary linear classifier, which nobody has planted."""
