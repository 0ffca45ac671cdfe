"""Tasks of turn environments."""
