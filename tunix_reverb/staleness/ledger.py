"""The ledger of permits: who may still send what, and how far to go meanwhile.

A trajectory is begun under a permit, which carries the policy version that its
actor must have at least. There are at most (max_policy_lag + 1) *
trajectories_per_update of them, so no more can be on its way than the learner
takes before the oldest becomes stale. A permit goes round like this:

  credit --issue--> stock --an actor takes it--> taken --> arrived --> credit
    ^                 |                            |
    +---- withdraw ---+---------- lease over ------+

The learner advances as in stale synchronous parallel (Ho et al. 2013, "More
effective distributed ML via a stale synchronous parallel parameter server"):
not past the version at which something on its way would become stale. So
nothing that was begun under a live permit is dropped for its lag, and
max_policy_lag = 0 is a synchronous run.

Pure bookkeeping: no threads, no clock, no table. All times are the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
import enum
import itertools
from typing import NamedTuple

from tunix_reverb import types

# Trajectories remembered after they were settled: more than can turn up again
# after a replay server has been restarted.
_SETTLED_KEPT = 10_000

# A trajectory that may have been lost is waited for so many times as long as
# the longest took before, and at least so many seconds.
_DOUBT_FACTOR = 2.0
_MIN_DOUBT_S = 10.0


class Arrival(enum.Enum):
  """What the ledger knows of a trajectory that has arrived.

  LIVE is under a permit that is out. LATE is under one that was given up, or
  that an earlier learner issued: it is used if it is fresh, and brings no
  permit back. SETTLED has come, or was reported as removed, before.
  """

  LIVE = 'live'
  LATE = 'late'
  SETTLED = 'settled'


class PermitCounts(NamedTuple):
  """How many permits are where; see the module's picture."""

  credit: int
  stock: int
  taken: int
  arrived: int


class _Taken(NamedTuple):
  """A permit with an actor: its version, since when, and until when."""

  policy_version: int
  taken_s: float
  until_s: float


class PermitLedger:
  """Where every permit is.

  Ids count up from `first_id`. All permits of the stock carry the same version.
  """

  def __init__(
    self,
    *,
    trajectories_per_update: int,
    max_policy_lag: int,
    num_permits: int,
    lease_s: float,
    first_id: int,
    policy_version: int,
  ):
    """All permits start as credit.

    Args:
      trajectories_per_update: most permits in stock.
      max_policy_lag: in publishes.
      num_permits: from trajectories_per_update up to max_policy_lag + 1 times
        as many.
      lease_s: seconds after which a taken permit is given up.
      first_id: of the first permit, > 0.
      policy_version: of the learner, published and confirmed.
    """
    self._update_size = trajectories_per_update
    self._max_lag = max_policy_lag
    self._lease_s = lease_s
    self._next_id = first_id
    self._credit = num_permits
    # In the order of issue, hence of version: id to version.
    self._stock: dict[int, int] = {}
    self._taken: dict[int, _Taken] = {}
    self._longest_s = 0.0  # From a permit's taking to the arrival.
    self._arrived: dict[int, int] = {}
    self._settled: dict[int, None] = {}
    self._version = self._confirmed = policy_version
    self.taken_total = 0  # Of those that went through the stock.
    self.reissued_total = 0

  @property
  def counts(self) -> PermitCounts:
    """How many permits are where; their sum never changes."""
    return PermitCounts(
      self._credit, len(self._stock), len(self._taken), len(self._arrived)
    )

  @property
  def policy_version(self) -> int:
    """The learner's version."""
    return self._version

  @property
  def stock_ids(self) -> list[int]:
    """Permits in stock, oldest first."""
    return list(self._stock)

  # What the table of permits is fed from.

  def confirm(self, policy_version: int) -> None:
    """Actors can get this version from now on."""
    self._confirmed = policy_version

  @property
  def stock_is_outdated(self) -> bool:
    """Whether permits in stock carry an older version than they could."""
    return _first(self._stock, self._confirmed) < self._confirmed

  def issue(self) -> list[types.Permit]:
    """Moves credit to the stock: permits to insert, in this order.

    None while the stock holds an older version: withdraw it first. While the
    learner's newest version is not confirmed, only as many as the updates take
    that are left before the confirmed one is too old.
    """
    if self.stock_is_outdated:
      return []
    version = self._confirmed
    updates_left = version + self._max_lag - self._version + 1
    out = sum(self.counts) - self._credit
    count = min(
      self._credit,
      self._update_size - len(self._stock),
      updates_left * self._update_size - out,
    )
    if count <= 0:
      return []
    ids = range(self._next_id, self._next_id + count)
    self._next_id += count
    self._credit -= count
    self._stock.update(dict.fromkeys(ids, version))
    return [types.Permit(permit_id, version) for permit_id in ids]

  def observe_taken(self, taken_total: int, now_s: float) -> None:
    """Learns how many permits actors have taken: the oldest of the stock.

    Args:
      taken_total: since the ledger began, as `self.taken_total` counts.
      now_s: when, monotonic seconds; leases count from here.
    """
    for permit_id in self.stock_ids[: max(0, taken_total - self.taken_total)]:
      self._take(permit_id, now_s)

  def withdraw(self) -> None:
    """Moves the stock back to credit; it is no longer in the table."""
    self._credit += len(self._stock)
    self._stock.clear()

  def expire(self, now_s: float) -> list[int]:
    """Gives up permits whose lease is over; returns them."""
    over = [
      permit_id
      for permit_id, taken in self._taken.items()
      if now_s > taken.until_s
    ]
    for permit_id in over:
      del self._taken[permit_id]
    self._credit += len(over)
    self.reissued_total += len(over)
    return over

  def doubt(self, now_s: float) -> None:
    """The server was restarted: what was taken before may be lost with it.

    Trajectories under way will come; so those that do not come for longer than
    any took before are given up, without waiting for the lease to end.
    """
    wait_s = max(_MIN_DOUBT_S, _DOUBT_FACTOR * self._longest_s)
    for permit_id, taken in self._taken.items():
      until_s = min(taken.until_s, now_s + wait_s)
      self._taken[permit_id] = taken._replace(until_s=until_s)

  # What becomes of the trajectories.

  def arrive(self, permit_id: int, now_s: float) -> Arrival:
    """A trajectory has reached the learner; 0 is one without a permit."""
    if permit_id in self._stock:
      # Faster than we could see it taken; so are those that lay before it.
      before = self.stock_ids.index(permit_id) + 1
      self.observe_taken(self.taken_total + before, now_s)
    if permit_id in self._taken:
      taken = self._taken.pop(permit_id)
      self._longest_s = max(self._longest_s, now_s - taken.taken_s)
      self._arrived[permit_id] = taken.policy_version
      return Arrival.LIVE
    if permit_id in self._arrived or permit_id in self._settled:
      return Arrival.SETTLED
    self._remember_settled([permit_id])
    return Arrival.LATE

  def settle(self, permit_ids: Iterable[int]) -> None:
    """Arrived trajectories were learnt or dropped: their permits come back."""
    come = [i for i in permit_ids if self._arrived.pop(i, None) is not None]
    self._credit += len(come)
    self._remember_settled(come)

  def remove(self, permit_id: int, now_s: float) -> bool:
    """A trajectory was removed before it could arrive.

    Returns:
      Whether that is news; else it has arrived after all, or was told before.
    """
    arrival = self.arrive(permit_id, now_s)
    if arrival is Arrival.LIVE:
      self.settle([permit_id])
    return arrival is not Arrival.SETTLED

  # How far the learner may go.

  @property
  def is_all_in(self) -> bool:
    """Whether every permit has arrived: no further trajectory can."""
    return not (self._credit or self._stock or self._taken)

  def holds(self, versions_ahead: int) -> bool:
    """Whether something could arrive too late for an update.

    Args:
      versions_ahead: publishes up to the one that follows the update, itself
        included.

    Returns:
      True if a trajectory that has not arrived yet would be stale after it.
    """
    oldest = self.oldest_version()
    return (
      oldest is not None
      and oldest + self._max_lag < self._version + versions_ahead
    )

  def oldest_version(self) -> int | None:
    """Oldest version that a trajectory yet to arrive may have; None if none.

    Permits in stock count, since we see only later that they were taken.
    """
    versions = [self._confirmed] if self._credit else []
    return min(versions + self._oldest_issued(), default=None)

  def advance(self) -> bool:
    """Makes the learner's version the next one, unless something would be
    stale then: returns False and changes nothing."""
    version = self._version + 1
    issued = self._oldest_issued() + list(self._arrived.values())
    if issued and min(issued) + self._max_lag < version:
      return False
    self._version = version
    return True

  def _take(self, permit_id: int, now_s: float) -> None:
    version = self._stock.pop(permit_id)
    self._taken[permit_id] = _Taken(version, now_s, now_s + self._lease_s)
    self.taken_total += 1

  def _oldest_issued(self) -> list[int]:
    """The oldest version taken, and the one in stock, if there are any."""
    taken = [
      one.policy_version for one in itertools.islice(self._taken.values(), 1)
    ]
    return taken + list(itertools.islice(self._stock.values(), 1))

  def _remember_settled(self, permit_ids: list[int]) -> None:
    self._settled.update(dict.fromkeys(i for i in permit_ids if i))
    while len(self._settled) > _SETTLED_KEPT:
      del self._settled[next(iter(self._settled))]


def _first(versions: Mapping[int, int], default: int) -> int:
  return next(iter(versions.values()), default)
