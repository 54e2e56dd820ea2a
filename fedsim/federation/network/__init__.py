"""The network of Flower's deployment engine: a SuperLink, its gate, and nodes with own data."""
