"""What one defense stack's federation computes, by whom and when, without Flower."""
