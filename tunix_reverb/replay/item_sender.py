"""What adders have in common: they send items until nobody waits any more."""

from __future__ import annotations

from collections.abc import Callable

from tunix_reverb import core
from tunix_reverb import types


class ItemSender:
  """Writes items.

  Attributes:
    items_total: items written so far.
    given_up_total: trajectories given up because there was no room.
  """

  def __init__(self, writer: core.ItemWriter, keep_waiting: Callable[[], bool]):
    """Writes through `writer`.

    Args:
      writer: takes the items.
      keep_waiting: asked each time the writer had no room; when it returns
        False the item is given up.
    """
    self._writer = writer
    self._keep_waiting = keep_waiting
    self.items_total = 0
    self.given_up_total = 0

  def _send(self, item: types.Trajectories) -> None:
    while not self._writer.write(item):
      if not self._keep_waiting():
        self.given_up_total += item.lengths.size
        return
    self.items_total += 1
