"""Who waits for a permit to begin, and the permits that have come.

Shared by the loops that begin nothing without a permit. Those who wait are
numbered; a permit is given to whoever was parked first, once the variables are
as new as it asks.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from tunix_reverb import core
from tunix_reverb import types


class PermitLine:
  """The line of N who may wait.

  It asks for exactly as many permits as are parked. With `in_turn`, permits are
  given by number, over and over, however long each takes: what is generated
  then does not depend on their speed, but the slowest holds up the others.
  """

  def __init__(self, permits: core.PermitSource, num: int, *, in_turn: bool):
    """Args: permits: where they come from; num: N; in_turn: see the class."""
    self._permits = permits
    self._num = num
    self._in_turn = in_turn
    self._parked = np.zeros(num, np.bool_)
    self._next_turn = 0
    # Those that a permit was requested for, and the permits that have come.
    self._line: collections.deque[int] = collections.deque()
    self._granted: collections.deque[types.Permit] = collections.deque()

  @property
  def num_parked(self) -> int:
    """How many wait for a permit or for its variables."""
    return int(np.count_nonzero(self._parked))

  @property
  def is_waiting(self) -> bool:
    """Whether a permit was requested and not given out yet."""
    return bool(self._line)

  @property
  def wanted_version(self) -> int:
    """The version that the next permit at hand asks for; 0 without any."""
    return self._granted[0].policy_version if self._granted else 0

  def park(self, numbers: Sequence[int]) -> None:
    """These wait from now on."""
    self._parked[list(numbers)] = True
    due = list(numbers)
    if self._in_turn:
      due = []
      while len(self._line) + len(due) < self._num:
        if not self._parked[self._next_turn]:
          break
        due.append(self._next_turn)
        self._next_turn = (self._next_turn + 1) % self._num
    self._line += due
    if due:
      self._permits.request(len(due))

  def fetch(self, timeout_s: float) -> None:
    """Takes the permits that have come; waits for the first if none is here."""
    self._granted += self._permits.take(0.0)
    if timeout_s and not self._granted:
      self._granted += self._permits.take(timeout_s)

  def can_release(self, policy_version: int) -> bool:
    """Whether somebody may begin with these variables."""
    return (
      bool(self._line)
      and 0 < len(self._granted)
      and (self.wanted_version <= policy_version)
    )

  def release(self, policy_version: int) -> tuple[list[int], list[int]]:
    """Gives out the permits that may be used.

    Returns:
      (who may begin, and under which permit id each).
    """
    numbers, permit_ids = [], []
    while self.can_release(policy_version):
      numbers.append(self._line.popleft())
      permit_ids.append(self._granted.popleft().permit_id)
    self._parked[numbers] = False
    return numbers, permit_ids

  def close(self, held: Sequence[int]) -> None:
    """Gives back what was not given out, and `held`; idempotent."""
    unused = [permit.permit_id for permit in self._granted]
    self._permits.close([*unused, *held])


class OwnPermits(core.PermitSource):
  """Permits of nobody's: for whoever begins as many as he likes."""

  def __init__(self, limit: int | None = None):
    """Args: limit: how many there are until `allow`; None for any number."""
    self._limit = limit
    self._requested = 0

  def allow(self, count: int) -> None:
    """There are `count` more."""
    if self._limit is not None:
      self._limit += count

  def request(self, count: int) -> None:
    """See base class."""
    self._requested += count

  def take(self, timeout_s: float) -> list[types.Permit]:
    """See base class; does not wait."""
    del timeout_s
    count = self._requested
    if self._limit is not None:
      count = min(count, self._limit)
      self._limit -= count
    self._requested -= count
    return [types.Permit(0, 0)] * count

  def close(self, held: Sequence[int] = ()) -> None:
    """See base class."""
