"""Finds every entry of the index, the oldest policy's first."""

from __future__ import annotations

from collections.abc import Iterable
import time
from typing import Any
from typing import NamedTuple

import grpc

from tunix_reverb import errors
from tunix_reverb.replay import entries as entries_lib
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import sample_stream

# Priorities of items that a reading has seen begin here, above those of any
# policy version. Doubles are exact to 2^53.
_FIRST_MARK = 1 << 40
_KEYS_PER_CALL = 10_000


class IndexItem(NamedTuple):
  """One item of the index.

  Attributes:
    key: its own.
    entries: what it holds; none if it cannot be read.
  """

  key: int
  entries: list[entries_lib.Entry]


class IndexReader:
  """Reads the index in slices, each of which ends by a deadline.

  The index hands out the item of lowest priority, and keeps it. Whatever was
  seen gets this reading's mark for its priority; when the lowest one has the
  mark, all have. Marks ascend from reading to reading, over processes and
  restored checkpoints, because they count the samples of the index, and a
  reading samples before it marks anything. No clock could promise that.

  Attributes:
    reading: whether there may be items that were not seen yet.
  """

  def __init__(self, address: str, channel: grpc.Channel, *, timeout_s: float):
    """Args: address, channel: of the server. timeout_s: of each call."""
    self._channel = channel
    self._timeout_s = timeout_s
    self._puller = sample_stream.Puller(address, tables.INDEX)
    self.begin(())

  def begin(self, seen: Iterable[int]) -> None:
    """Begins anew. Args: seen: keys of items that need not be read."""
    self.reading = True
    self._mark = 0
    self._seen = list(seen)

  def see(self, keys: Iterable[int]) -> None:
    """Says that the items of these keys need not be read any more."""
    if self.reading:
      self._seen += keys

  def read(self, info: Any, deadline_s: float) -> list[IndexItem]:
    """Reads on until all is read or the deadline is past; at least one item.

    Args:
      info: the index's `TableInfo`, of after the previous call.
      deadline_s: by `time.monotonic`.

    Raises:
      errors.ReplayUnavailableError, errors.DeadlineExceededError: the server
        does not answer. What was read before may be lost: begin anew.
    """
    found: list[IndexItem] = []
    if not info.current_size:
      self.reading = False
    while self.reading:
      item, priority = self._lowest()
      if not self._mark:
        self._mark = _FIRST_MARK + info.rate_limiter_info.sample_stats.completed
      elif priority >= self._mark:
        self.reading = False
        break
      found.append(item)
      self._mark_seen([item.key, *self._seen])
      # What was laid together here may still have items of its own.
      self._seen = [e.key for e in item.entries if e.key != item.key]
      if time.monotonic() > deadline_s:
        break
    return found

  def close(self) -> None:
    """Ends the connection; idempotent."""
    self._puller.close()

  def _lowest(self) -> tuple[IndexItem, float]:
    """The item of lowest priority, and its priority."""
    poison = self._puller.poison
    poison.clear()
    sampled = self._puller.pull(1, self._timeout_s)
    if sampled:
      raw = sampled[0]
      return IndexItem(raw.key, decode(raw.columns)), raw.priority
    if poison and poison[-1] is not None:
      # Its priority is unknown; whoever reads removes it.
      return IndexItem(poison[-1], []), 0.0
    raise errors.DeadlineExceededError(
      f'the index gave no item within {self._timeout_s:g} s'
    )

  def _mark_seen(self, keys: list[int]) -> None:
    for i in range(0, len(keys), _KEYS_PER_CALL):
      priorities = dict.fromkeys(keys[i : i + _KEYS_PER_CALL], self._mark)
      admin.update_priorities(
        self._channel, tables.INDEX, priorities, self._timeout_s
      )


def decode(columns: list[Any]) -> list[entries_lib.Entry]:
  """The entries in an item's columns; none if they are no entries."""
  try:
    return entries_lib.decode_entries(columns)
  except ValueError:
    return []
