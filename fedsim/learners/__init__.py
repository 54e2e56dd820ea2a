"""What clients compute from their data: training, and releases in closed form."""
