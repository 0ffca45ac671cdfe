"""Pretrained models: reading and writing checkpoints of others."""
