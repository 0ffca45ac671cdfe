"""Environments by one string, and N of them behind one interface of arrays."""
