"""Rows and their membership from releases in closed form."""
