"""Length buckets and packing: trajectories in, rows of fixed shape out."""
