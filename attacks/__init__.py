"""Attacks by family: a file without an underscore is one, a file with an underscore helps."""
