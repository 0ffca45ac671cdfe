"""The entries that a sweeper knows, and which of them are too old."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import numpy as np

from tunix_reverb.replay import entries as entries_lib
from tunix_reverb.staleness import bound as bound_lib

_ENTRY_FIELDS = [
  ('key', np.uint64),
  ('policy_version', np.int64),
  ('created_at_s', np.float64),
  ('permit_id', np.int64),
  ('length', np.int32),
]
_ROW = np.dtype(
  [
    *_ENTRY_FIELDS,
    ('holder', np.uint64),
    ('known_since_s', np.float64),
    ('doubtful', np.bool_),
    ('told', np.bool_),
  ]
)


class EntrySet:
  """N entries, in arrays: a look at a million of them takes milliseconds.

  Each is held by an item of the index, its holder. Not for several threads.
  """

  def __init__(self) -> None:
    self._rows = np.empty(0, _ROW)
    self._keys: set[int] = set()
    self._held: collections.Counter[int] = collections.Counter()

  def __len__(self) -> int:
    return len(self._rows)

  def __contains__(self, key: object) -> bool:
    return key in self._keys

  @property
  def keys(self) -> np.ndarray:
    """The keys of all, uint64 [N]."""
    return self._rows['key']

  @property
  def holders(self) -> collections.abc.KeysView[int]:
    """Keys of the items of the index that hold any."""
    return self._held.keys()

  @property
  def loose(self) -> np.ndarray:
    """Which have an item of the index of their own: bool [N]."""
    return self._rows['holder'] == self._rows['key']

  @property
  def known_since_s(self) -> np.ndarray:
    """When each became known, f64 [N], by the clock of `add`."""
    return self._rows['known_since_s']

  @property
  def doubtful(self) -> np.ndarray:
    """Whose items may have been removed untold: bool [N], to be written to."""
    return self._rows['doubtful']

  @property
  def told(self) -> np.ndarray:
    """Whose removals the learner was told: bool [N], to be written to."""
    return self._rows['told']

  def add(
    self,
    held: Iterable[tuple[int, Iterable[entries_lib.Entry]]],
    *,
    now_s: float,
    doubtful: bool = False,
  ) -> None:
    """Adds the entries whose keys are not known yet.

    Args:
      held: key of the item of the index, and the entries that it holds.
      now_s: since when they are known.
      doubtful: their items may have been removed untold.
    """
    rows = []
    for holder, entries in held:
      for entry in entries:
        if entry.key not in self._keys:
          self._keys.add(entry.key)
          self._held[holder] += 1
          rows.append((*entry, holder, now_s, doubtful, False))
    if rows:
      self._rows = np.concatenate([self._rows, np.array(rows, _ROW)])

  def causes(
    self, bound: bound_lib.StalenessBound, *, learner_version: int, now_s: float
  ) -> np.ndarray:
    """Why each is too old: int8 [N], codes of `staleness.bound`.

    Args:
      bound: how old is too old.
      learner_version: version the learner published last.
      now_s: wall-clock seconds.
    """
    return bound.causes(
      self._rows['policy_version'],
      self._rows['created_at_s'],
      learner_version=learner_version,
      now_s=now_s,
    )

  def entries(self, mask: np.ndarray) -> list[entries_lib.Entry]:
    """Those of `mask`, bool [N]."""
    names = [name for name, _ in _ENTRY_FIELDS]
    return [entries_lib.Entry(*row) for row in self._rows[names][mask].tolist()]

  def removals(self, mask: np.ndarray, cause: int) -> list[entries_lib.Removal]:
    """What to tell of those of `mask`, bool [N], removed for `cause`."""
    return [
      entries_lib.Removal(entry.key, entry.permit_id, entry.length, cause)
      for entry in self.entries(mask)
    ]

  def move(self, mask: np.ndarray, holder: int) -> None:
    """Those of `mask`, bool [N], are in another item of the index now."""
    self._let_go(mask)
    self._rows['holder'][mask] = holder
    self._held[holder] += int(mask.sum())

  def discard(self, mask: np.ndarray) -> list[int]:
    """Forgets those of `mask`, bool [N].

    Returns:
      Keys of the items of the index that hold nothing else.
    """
    self._keys.difference_update(self._rows['key'][mask].tolist())
    empty = self._let_go(mask)
    self._rows = self._rows[~mask]
    return empty

  def _let_go(self, mask: np.ndarray) -> list[int]:
    """The holders of those of `mask` hold them no longer; the empty ones."""
    holders, counts = np.unique(self._rows['holder'][mask], return_counts=True)
    empty = []
    for holder, count in zip(holders.tolist(), counts.tolist()):
      self._held[holder] -= count
      if not self._held[holder]:
        del self._held[holder]
        empty.append(holder)
    return empty
