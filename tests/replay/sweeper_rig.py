"""Writers, readers and lists of what is left, for the tests of the sweeper.

Speaks to a real server over the wire, as any role does.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import numpy as np

from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import entries
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.replay.wire_client import sample_stream

COLUMNS = test_utils.columns()
TIMEOUT_S = 20.0
_CODEC = columns_lib.ColumnCodec(COLUMNS)
_KEYS = itertools.count(1)


@dataclasses.dataclass
class Written:
  """A trajectory in the table and its entry."""

  entry: entries.Entry
  columns: list[np.ndarray]

  @property
  def key(self) -> int:
    return self.entry.key

  def items(self, *, announce=True, index=True, trajectory=True):
    key, priority = self.entry.key, float(self.entry.policy_version)
    told = [tables.INDEX] * index + [tables.ANNOUNCEMENTS] * announce
    items = []
    if told:
      items.append(
        insert_stream.NewItem(
          [(table, key, priority) for table in told],
          entries.encode_entry(self.entry),
        )
      )
    if trajectory:
      items.append(
        insert_stream.NewItem(
          [(tables.TRAJECTORIES, key, priority)], self.columns
        )
      )
    return items


def trajectory(version: int, *, age_s: float = 0.0, length: int = 3) -> Written:
  """One that was begun `age_s` ago; its permit is its key, negative."""
  key = next(_KEYS)
  item = test_utils.item(lengths=(length,), policy_version=version)
  created_at_s = time.time() - age_s
  item = item._replace(
    created_at_s=np.array([created_at_s]), permit_id=np.array([-key])
  )
  return Written(
    entries.Entry(key, version, created_at_s, -key, length),
    _CODEC.flatten(item),
  )


class Rig:
  """Everything that happens to one server."""

  def __init__(self, address: str):
    self.address = address
    self._inserter = insert_stream.Inserter(address)

  def close(self) -> None:
    self._inserter.close()

  def write(self, written: list[Written], **parts) -> None:
    """One request; returns when all is in its tables."""
    items = [item for one in written for item in one.items(**parts)]
    self._inserter.insert(items, TIMEOUT_S)

  def write_from(self, num_writers: int, written: list[Written]) -> None:
    """Several writers, each with a connection of its own, at once."""
    failed = []

    def run(share: list[Written]) -> None:
      rig = Rig(self.address)
      try:
        for one in share:
          rig.write([one])
      except Exception as e:
        failed.append(e)
      finally:
        rig.close()

    threads = [
      threading.Thread(target=run, args=(written[i::num_writers],))
      for i in range(num_writers)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert not failed, failed

  def fill(self, table: str, number: int) -> None:
    """Puts `number` items of no interest into a table."""
    entries_ = [(table, next(_KEYS), 0.0) for _ in range(number)]
    self._inserter.insert(
      [insert_stream.NewItem(entries_, [np.array(0)])], TIMEOUT_S
    )

  def publish(self, version: int) -> None:
    """The learner's newest version, as its sink tells it."""
    self._inserter.insert(
      [
        insert_stream.NewItem(
          [(tables.POLICY_VERSION, next(_KEYS), float(version))],
          [np.array(version, np.int64)],
        )
      ],
      TIMEOUT_S,
    )

  def size(self, table: str) -> int:
    return self._info(table).current_size

  def _info(self, table: str):
    return admin.info(self.address, TIMEOUT_S)[table]

  def take(self, table: str, count: int) -> list[sample_stream.RawItem]:
    """Exactly `count` samples of a table."""
    puller = sample_stream.Puller(self.address, table)
    try:
      items = puller.pull(count, TIMEOUT_S)
      assert len(items) == count and not puller.poison
      return items
    finally:
      puller.close()

  def keys_left(self, table: str = tables.TRAJECTORIES) -> set[int]:
    """All keys in a table; takes them out where each is sampled once.

    Elsewhere the sampler is uniform: it is asked until as many different ones
    came as there are.
    """
    info = self._info(table)
    size = info.current_size
    keys: set[int] = set()
    if not size:
      return keys
    if info.max_times_sampled == 1:
      return {item.key for item in self.take(table, size)}
    for _ in range(100):
      keys |= {item.key for item in self.take(table, 4 * size)}
      if len(keys) == size:
        return keys
    raise AssertionError(f'{len(keys)} of {size} items came')

  def removals(self) -> list[entries.Removal]:
    """Takes what the learner was told of."""
    size = self.size(tables.REMOVED)
    if not size:
      return []
    return [
      removal
      for item in self.take(tables.REMOVED, size)
      for removal in entries.decode_removals(item.columns)
    ]
