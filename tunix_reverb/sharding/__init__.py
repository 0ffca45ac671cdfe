"""The device mesh and what lives where on it."""
