"""Binaries: one process per role, and `local`, which runs all of them."""
