"""Defenses: one file each."""
