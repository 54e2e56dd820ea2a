"""Images out of the update of a Kolmogorov-Arnold network."""
