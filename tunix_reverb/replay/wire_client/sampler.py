"""Reads items of one or several servers, with an exact bound on prefetching."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import logging
import threading
import time

import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import decoder as decoder_lib
from tunix_reverb.replay.wire_client import shard as shard_lib

_MAX_POISON_KEYS = 1000


class WireItemSampler(core.ItemSampler):
  """Reads one table of several servers (shards), taking turns between them.

  A credit window bounds prefetching: of each shard, at most `max_in_flight`
  items are out of the table and not yet returned by `sample`, wherever they
  are; in queue mode these are lost when the process ends, and they age
  meanwhile. New ones are asked for in lots of half the window. For up to five
  seconds after the end of a sampler the table goes on to give out what that had
  asked for: the same number bounds what is lost then. While it runs, an item
  can be lost that comes exactly five seconds after the one before.

  A server that does not answer is logged and reconnected to, and the others go
  on. One that restarts from a checkpoint delivers again what was sampled since
  that was written; where each item is sampled once (queue mode), the sampler
  drops what it knows, by key, from among its last 130,000 items of a shard at
  least.

  Items that do not fit `columns`, contradict themselves or cannot be decoded
  are counted in `poison_items` and skipped; where items are sampled more than
  once, they are deleted from the table as well. `NaN`s are data, not poison.

  Args:
    addresses: 'host:port' of each server.
    columns: `Trajectories` of `ColumnSpec`, the table's signature.
    table: the table's name.
    max_in_flight: most items of a shard sampled and not yet returned.
    unavailable_timeout_s: seconds without an answer from any server after
      which the sampler has failed for good.
  """

  def __init__(
    self,
    addresses: Sequence[str],
    *,
    columns: types.Trajectories,
    table: str = tables.TRAJECTORIES,
    max_in_flight: int = 4,
    unavailable_timeout_s: float = 120.0,
  ):
    """Starts reading; returns at once, whether the servers are up or not."""
    for name, value in (
      ('len(addresses)', len(addresses)),
      ('max_in_flight', max_in_flight),
    ):
      if value < 1:
        raise ValueError(f'{name} ({value}) must be >= 1')
    self._unavailable_timeout_s = unavailable_timeout_s
    self._codec = columns_lib.ColumnCodec(columns)
    self._decoder = decoder_lib.Decoder(
      dtypes=_extended_dtypes(columns, self._codec.paths)
    )
    self._ready = threading.Condition()
    self._closed = False
    self._turn = 0
    self._poison_items = 0
    self._poison_keys: collections.deque[int | None] = collections.deque(
      maxlen=_MAX_POISON_KEYS
    )
    self._duplicate_items = 0
    self._shards = [
      shard_lib.Shard(address, table, max_in_flight, self._ready)
      for address in addresses
    ]

  @property
  def poison_items(self) -> int:
    """Items skipped because they cannot be read or do not fit the columns."""
    return self._poison_items

  @property
  def poison_keys(self) -> list[int | None]:
    """Keys of the newest thousand of them."""
    return list(self._poison_keys)

  @property
  def duplicate_items(self) -> int:
    """Items dropped because they had been sampled before a restart."""
    return self._duplicate_items

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
    while True:
      with self._ready:
        taken = self._wait(deadline_s)
      if taken is None:
        return None
      item = self._decode(*taken)
      if item is not None:
        return item

  def close(self) -> list[types.SampledItem]:
    """See `core.ItemSampler`."""
    with self._ready:
      self._closed = True
      self._ready.notify_all()
    received = [
      (shard, encoded) for shard in self._shards for encoded in shard.close()
    ]
    items = [self._decode(shard, encoded) for shard, encoded in received]
    return [item for item in items if item is not None]

  def _wait(
    self, deadline_s: float
  ) -> tuple[shard_lib.Shard, decoder_lib.EncodedItem] | None:
    """The next item of the shard whose turn it is, with the lock held."""
    while not self._closed:
      for i in range(len(self._shards)):
        shard = self._shards[(self._turn + i) % len(self._shards)]
        encoded = shard.take()
        if encoded is not None:
          self._turn += i + 1
          return shard, encoded
      self._raise_if_failed()
      for shard in self._shards:
        shard.restart_if_stalled()
      remaining_s = deadline_s - time.monotonic()
      if remaining_s <= 0:
        return None
      self._ready.wait(min(remaining_s, 1.0))
    return None

  def _raise_if_failed(self) -> None:
    silent_s = min(shard.health.silent_s() for shard in self._shards)
    if silent_s > self._unavailable_timeout_s:
      names = ', '.join(shard.address for shard in self._shards)
      raise errors.ReplayUnavailableError(
        f'no replay server of {names} has answered for {silent_s:.0f} s '
        f'(unavailable_timeout_s is {self._unavailable_timeout_s:g})'
      )

  def _decode(
    self, shard: shard_lib.Shard, encoded: decoder_lib.EncodedItem
  ) -> types.SampledItem | None:
    """The item, or None if it is poison or was sampled before."""
    try:
      raw = self._decoder.decode(encoded)
      trajectories = self._unflatten(raw)
    except errors.PoisonItemError as e:
      self._skip(shard, e)
      return None
    with self._ready:
      if shard.is_duplicate(raw.key):
        self._duplicate_items += 1
        return None
    return types.SampledItem(
      key=raw.key,
      priority=raw.priority,
      times_sampled=raw.times_sampled,
      trajectories=trajectories,
      inserted_at_s=raw.inserted_at_s,
    )

  def _unflatten(self, raw: decoder_lib.RawItem) -> types.Trajectories:
    try:
      return self._codec.read(raw.columns)
    except errors.SpecMismatchError as e:
      raise errors.PoisonItemError(f'item {raw.key}: {e}', key=raw.key) from e

  def _skip(
    self, shard: shard_lib.Shard, error: errors.PoisonItemError
  ) -> None:
    with self._ready:
      self._poison_items += 1
      self._poison_keys.append(error.key)
      if error.key is not None and not self._closed:
        shard.delete_if_it_stays(error.key)
    if self._poison_items & (self._poison_items - 1) == 0:  # 1st, 2nd, 4th...
      logging.warning(
        'skipped poison item %d of %s: %s',
        self._poison_items,
        shard.address,
        error,
      )


def _extended_dtypes(
  columns: types.Trajectories, paths: Sequence[str]
) -> list[np.dtype] | None:
  """Dtypes by path if some are stored as raw integers, else None."""
  flat = specs.flatten_columns(columns)
  dtypes = [flat[path].dtype for path in paths]
  if all(codec.stored_dtype(dtype) == dtype for dtype in dtypes):
    return None
  return dtypes
