"""Replay: tables, checkpoints, the adder, and clients of a replay server."""
