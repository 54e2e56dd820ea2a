"""What several releases of the same data guarantee together."""
