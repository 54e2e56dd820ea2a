"""Formulas of earlier papers, to compare with and not to rely on."""
