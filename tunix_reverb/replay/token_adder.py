"""The adder of token trajectories: whole episodes in, items out.

An episode is one trajectory: its second part would lack what the policy had
seen of the first. Trajectories that are added together, those of a group, stay
together in one item.
"""

from __future__ import annotations

from collections.abc import Callable
import time

from tunix_reverb import core
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.replay import item_sender


class TokenAdder(item_sender.ItemSender):
  """Gathers trajectories up to a size and an age, and writes them."""

  def __init__(
    self,
    *,
    writer: core.ItemWriter,
    item_transitions: int,
    item_age_s: float,
    keep_waiting: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Writes items through `writer`.

    Args:
      writer: takes the items.
      item_transitions: most transitions of an item that holds more than what
        was added at once.
      item_age_s: age at which trajectories are sent whatever their size,
        seconds.
      keep_waiting: asked each time the writer had no room; when it returns
        False the item is given up.
      clock: seconds.
    """
    super().__init__(writer, keep_waiting)
    self._most = item_transitions
    self._item_age_s = item_age_s
    self._clock = clock
    self._pending: list[types.Trajectories] = []
    self._transitions = 0
    self._since_s = 0.0

  def add(self, trajectories: types.Trajectories) -> None:
    """Takes whole trajectories, which stay together."""
    size = int(trajectories.lengths.sum())
    if self._transitions + size > self._most:
      self.flush()
    if not self._pending:
      self._since_s = self._clock()
    self._pending.append(trajectories)
    self._transitions += size
    if self._transitions >= self._most:
      self.flush()

  def send_due(self) -> None:
    """Sends what is old enough."""
    if self._pending and self._clock() - self._since_s > self._item_age_s:
      self.flush()

  def flush(self) -> None:
    """Sends what there is."""
    if not self._pending:
      return
    item = specs.join(self._pending)
    self._pending, self._transitions = [], 0
    self._send(item)
