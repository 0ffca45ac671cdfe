"""Buckets: the fixed [B, L] shapes that batches come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
  """One batch shape: `rows` B of `length` L positions each."""

  length: int
  rows: int

  @property
  def positions(self) -> int:
    """B * L."""
    return self.rows * self.length

  @property
  def max_segments(self) -> int:
    """The most segments a row can hold: the shortest takes two positions."""
    return self.length // 2


def make_buckets(
  lengths: Sequence[int], *, batch_positions: int, row_multiple: int = 1
) -> tuple[Bucket, ...]:
  """Buckets of about `batch_positions` positions each.

  Args:
    lengths: row lengths, ascending.
    batch_positions: wanted B * L of every bucket.
    row_multiple: B is a multiple of this (the devices that rows are split
      over), rounded up.

  Returns:
    One bucket per length.
  """
  buckets = []
  for length in lengths:
    rows = max(1, batch_positions // length)
    rows = -(-rows // row_multiple) * row_multiple
    buckets.append(Bucket(length=length, rows=rows))
  return tuple(buckets)
