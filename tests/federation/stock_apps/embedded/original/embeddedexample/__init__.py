"""embeddedexample: A Flower / PyTorch app."""
