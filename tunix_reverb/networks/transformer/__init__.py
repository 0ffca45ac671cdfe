"""Decoder-only transformer policies with a value head, sharded over a mesh."""
