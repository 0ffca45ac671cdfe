"""Reads items of one or several servers through Reverb's C++ sampler."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import logging
import threading
import time

import numpy as np
from reverb import pybind

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import tables
from tunix_reverb.replay.reverb_client import connection

_CONNECT_TIMEOUT_S = 1
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0

# A C++ sampler ends after this many items; a new one then takes over.
_ITEMS_PER_SAMPLER = 10**9


class OfficialItemSampler(core.ItemSampler):
  """Reads one table of several servers (shards), taking turns between them.

  One daemon thread per server owns the C++ sampler and fills a queue of
  `queue_size` items. The server has handed out up to `max_in_flight +
  queue_size` items per shard that `sample` has not returned yet: in queue mode
  these are lost when the process ends, and they age meanwhile; keep both small.

  A server that does not answer is logged and reconnected to; the others go on.
  Items that do not fit `columns`, or contradict themselves, are counted in
  `poison_items` and skipped. `NaN`s are data, not poison.

  Reverb takes a server on this host with the same process id for one in this
  process. Two containers that share a network, with a reader and a server that
  are both process 1, crash: start one of them under an init process.

  Args:
    addresses: 'host:port' of each server.
    columns: `Trajectories` of `ColumnSpec`, the table's signature.
    table: the table's name.
    max_in_flight: items requested from a server ahead of need.
    queue_size: items per server received and not yet returned.
    unavailable_timeout_s: seconds without an answer from any server after
      which the sampler has failed for good.
  """

  def __init__(
    self,
    addresses: Sequence[str],
    *,
    columns: types.Trajectories,
    table: str = tables.TRAJECTORIES,
    max_in_flight: int = 2,
    queue_size: int = 2,
    unavailable_timeout_s: float = 120.0,
  ):
    """Starts reading; returns at once, whether the servers are up or not."""
    for name, value in (
      ('len(addresses)', len(addresses)),
      ('max_in_flight', max_in_flight),
      ('queue_size', queue_size),
    ):
      if value < 1:
        raise ValueError(f'{name} ({value}) must be >= 1')
    self._unavailable_timeout_s = unavailable_timeout_s
    lock = threading.Lock()
    self._ready = threading.Condition(lock)
    self._closed = False
    self._turn = 0
    codec = columns_lib.ColumnCodec(columns)
    self._shards = [
      _Shard(
        address, codec, table, max_in_flight, queue_size, lock, self._ready
      )
      for address in addresses
    ]

  @property
  def poison_items(self) -> int:
    """Items skipped because they do not fit the columns."""
    return sum(shard.poison_items for shard in self._shards)

  @property
  def broken_streams(self) -> int:
    """Times that a read failed and a new connection took over."""
    return sum(shard.broken_streams for shard in self._shards)

  def silent_s(self) -> dict[str, float]:
    """Seconds since each server was last heard from, by address."""
    return {shard.address: shard.health.silent_s() for shard in self._shards}

  def sample(self, timeout_s: float) -> types.SampledItem | None:
    """See `core.ItemSampler`; None after `close`."""
    deadline_s = time.monotonic() + timeout_s
    with self._ready:
      while not self._closed:
        item = self._take()
        if item is not None:
          return item
        self._raise_if_failed()
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
          return None
        self._ready.wait(min(remaining_s, 1.0))
    return None

  def close(self) -> list[types.SampledItem]:
    """See `core.ItemSampler`.

    A thread that is blocked in C++ ends with the process, or after the next
    item, which it drops.
    """
    with self._ready:
      self._closed = True
      self._ready.notify_all()
    return [item for shard in self._shards for item in shard.close()]

  def _take(self) -> types.SampledItem | None:
    """The next item of the shard whose turn it is, with the lock held."""
    for i in range(len(self._shards)):
      index = (self._turn + i) % len(self._shards)
      item = self._shards[index].take()
      if item is not None:
        self._turn = index + 1
        return item
    return None

  def _raise_if_failed(self) -> None:
    silent_s = min(shard.health.silent_s() for shard in self._shards)
    if silent_s > self._unavailable_timeout_s:
      names = ', '.join(shard.address for shard in self._shards)
      raise errors.ReplayUnavailableError(
        f'no replay server of {names} has answered for {silent_s:.0f} s '
        f'(unavailable_timeout_s is {self._unavailable_timeout_s:g})'
      )


class _Shard:
  """One server: its thread, its queue, and what went wrong with it."""

  def __init__(
    self,
    address: str,
    codec: columns_lib.ColumnCodec,
    table: str,
    max_in_flight: int,
    queue_size: int,
    lock: threading.Lock,
    ready: threading.Condition,
  ):
    self.address = address
    self.poison_items = 0
    self.broken_streams = 0
    self.health = connection.HealthCheck(address)
    self._codec = codec
    self._table = table
    self._max_in_flight = max_in_flight
    self._queue_size = queue_size
    self._items: collections.deque[types.SampledItem] = collections.deque()
    self._closed = False
    self._ready = ready
    # Shares the lock with `ready`; taking an item wakes this shard's thread
    # alone.
    self._room = threading.Condition(lock)
    self._backoff_s = _MIN_BACKOFF_S
    threading.Thread(
      target=self._run, daemon=True, name=f'sampler of {address}'
    ).start()

  def take(self) -> types.SampledItem | None:
    """The oldest item received, or None; called with the lock held."""
    if not self._items:
      return None
    item = self._items.popleft()
    self._room.notify()
    return item

  def close(self) -> list[types.SampledItem]:
    """Tells the thread to end; returns what it has received."""
    self.health.close()
    with self._room:
      self._closed = True
      items = list(self._items)
      self._items.clear()
      self._room.notify()
    return items

  def _run(self) -> None:
    while not self._closed:
      try:
        self._read()
      except connection.STATUS_ERRORS as e:
        if self._closed:
          return
        self.broken_streams += 1
        logging.info('sampler of %s reconnects: %s', self.address, e)
        with self._room:
          self._room.wait_for(lambda: self._closed, self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

  def _read(self) -> None:
    """Opens a C++ sampler and fills the queue from it."""
    client = connection.connect(self.address)
    infos = connection.table_infos(client, _CONNECT_TIMEOUT_S)
    if self._table not in infos:
      raise ValueError(
        f'it must serve a table {self._table!r} and serves '
        f'{", ".join(sorted(infos))}'
      )
    self.health.heard()
    sampler = client.NewSampler(
      self._table, _ITEMS_PER_SAMPLER, self._max_in_flight
    )
    for _ in range(_ITEMS_PER_SAMPLER):
      raw = sampler.GetNextTrajectory()
      self.health.heard()
      self._backoff_s = _MIN_BACKOFF_S
      try:
        item = _to_item(raw, self._codec)
      except errors.SpecMismatchError as e:
        self.poison_items += 1
        if self.poison_items & (self.poison_items - 1) == 0:  # 1st, 2nd, 4th...
          logging.warning(
            'skipped poison item %d of %s: %s',
            self.poison_items,
            self.address,
            e,
          )  # pyformat: skip
        continue
      with self._room:
        self._room.wait_for(
          lambda: self._closed or len(self._items) < self._queue_size
        )
        if self._closed:
          return
        self._items.append(item)
        self._ready.notify()


def _to_item(
  raw: list[np.ndarray], codec: columns_lib.ColumnCodec
) -> types.SampledItem:
  """Turns what the C++ sampler returned into an item, without copies.

  Args:
    raw: key, probability, table size, priority, times sampled, then the
      columns, each with a leading axis of 1 (one timestep of the writer's).
    codec: of the table's columns.

  Raises:
    errors.SpecMismatchError: it does not fit.
  """
  num_facts = pybind.Sampler.NUM_INFO_TENSORS
  arrays = []
  for array in raw[num_facts:]:
    if array.ndim == 0 or array.shape[0] != 1:
      raise errors.SpecMismatchError(
        f'a column of shape {array.shape} is not one whole array'
      )
    arrays.append(array[0])
  trajectories = codec.read(arrays)
  key, _, _, priority, times_sampled = raw[:num_facts]
  return types.SampledItem(
    key=int(key),
    priority=float(priority),
    times_sampled=int(times_sampled),
    trajectories=trajectories,
  )
