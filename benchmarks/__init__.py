"""Measurements of speed, each against a baseline of the same run."""
