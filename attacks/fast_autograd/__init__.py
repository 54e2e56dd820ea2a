"""Layers that are cheap to differentiate twice, as gradient matching does."""
