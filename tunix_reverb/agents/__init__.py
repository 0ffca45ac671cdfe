"""Composition roots: one folder per agent."""
