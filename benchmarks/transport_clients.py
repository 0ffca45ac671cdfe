"""What `benchmarks.transport` measures: each client inserts, and samples.

The official client at the best it can do: its legacy writer with whole arrays,
and its low-level sampler, arrays in and arrays out. The wire client as its
users have it, `WireItemWriter` and `WireItemSampler`, with all their checks,
and without them what it samples with underneath (`sample_wire_arrays`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import time
from typing import NamedTuple

import numpy as np

from tunix_reverb import specs
from tunix_reverb import types

WINDOW = 256  # Items on their way, of either client's writer.
_OFFICIAL_PREFETCH = 16  # Its sampler is no faster with more.
_TIMEOUT_S = 30.0
_WARM_UP_ITEMS = 50


class Rate(NamedTuple):
  """Items per second, and per CPU-second of this process."""

  per_s: float
  per_cpu_s: float


class Workload(NamedTuple):
  """Items of one size.

  Attributes:
    name: for people.
    table: the table's name on the server.
    max_items: the table's size.
    columns: `Trajectories` of `ColumnSpec`.
    item: one trajectory of random floats, which do not compress.
  """

  name: str
  table: str
  max_items: int
  columns: types.Trajectories
  item: types.Trajectories


def make_workload(
  name: str, num_bytes: int, length: int, max_items: int
) -> Workload:
  """Items of about `num_bytes` bytes and `length` transitions."""
  size = max(1, (num_bytes - 100 - 19 * length) // (4 * (length + 1)))
  rng = np.random.default_rng(0)
  ones = lambda dtype, n=length: np.ones(n, dtype)
  floats = lambda *shape: rng.standard_normal(shape, np.float32)
  item = types.Trajectories(
    observation=floats(length + 1, size),
    action=ones(np.uint8),
    reward=floats(length),
    discount=ones(np.float32),
    behaviour_log_prob=floats(length),
    policy_version=ones(np.int32),
    loss_mask=ones(np.bool_),
    core_state=(),
    lengths=np.array([length], np.int32),
    created_at_s=ones(np.float64, 1),
    actor_id=ones(np.int32, 1),
    episode_id=ones(np.int64, 1),
    truncated=ones(np.bool_, 1),
    permit_id=ones(np.int64, 1),
  )
  columns = types.Trajectories(
    *(
      column
      if isinstance(column, tuple)
      else specs.ColumnSpec((None, *column.shape[1:]), column.dtype)
      for column in item
    )
  )
  return Workload(name, f'items_of_{num_bytes}', max_items, columns, item)


def insert_official(address: str, work: Workload, seconds: float) -> Rate:
  """The legacy writer, one thread, whole arrays."""
  from reverb import pybind

  from tunix_reverb.replay import columns

  arrays = columns.ColumnCodec(work.columns).flatten(work.item)
  client = pybind.Client(address)
  client.ServerInfo(int(_TIMEOUT_S))
  writer = client.NewWriter(1, 1, False, WINDOW)

  def insert() -> None:
    writer.Append(arrays)
    writer.CreateItem(work.table, 1, 1.0)

  rate = _measure(insert, writer.Flush, seconds)
  writer.Close(False)
  return rate


def insert_wire(address: str, work: Workload, seconds: float) -> Rate:
  """`WireItemWriter`, one thread."""
  from tunix_reverb.replay.wire_client import writer as writer_lib

  writer = writer_lib.WireItemWriter(
    address, columns=work.columns, table=work.table, max_pending_items=WINDOW
  )

  def insert() -> None:
    if not writer.write(work.item, _TIMEOUT_S):
      raise TimeoutError('the server takes no items')

  def flush() -> None:
    while writer.unconfirmed_items:
      time.sleep(0.0005)

  with contextlib.closing(_Closing(lambda: writer.close(_TIMEOUT_S))):
    return _measure(insert, flush, seconds)


def sample_official(address: str, work: Workload, seconds: float) -> Rate:
  """The low-level sampler, one thread: facts and columns as arrays."""
  from reverb import pybind

  sampler = pybind.Client(address).NewSampler(
    work.table, 10**9, _OFFICIAL_PREFETCH
  )
  return _measure(sampler.GetNextTrajectory, _nothing, seconds)


def sample_wire_arrays(address: str, work: Workload, seconds: float) -> Rate:
  """The wire client's stream and decoder, one thread: the same as arrays."""
  items = _wire_arrays(address, work.table)
  with contextlib.closing(items):
    return _measure(lambda: next(items), _nothing, seconds)


def sample_wire(address: str, work: Workload, seconds: float) -> Rate:
  """`WireItemSampler`, one thread: checked trajectories."""
  from tunix_reverb.replay.wire_client import sampler as sampler_lib

  sampler = sampler_lib.WireItemSampler(
    [address], columns=work.columns, table=work.table, max_in_flight=WINDOW
  )

  def sample() -> None:
    if sampler.sample(_TIMEOUT_S) is None:
      raise TimeoutError('the server gives no items')

  with contextlib.closing(sampler):
    return _measure(sample, _nothing, seconds)


class _Closing:
  """Something to close."""

  def __init__(self, close: Callable[[], object]):
    self.close = close


def _wire_arrays(address: str, table: str) -> Iterator[object]:
  from tunix_reverb.replay.wire_client import connection
  from tunix_reverb.replay.wire_client import decoder as decoder_lib
  from tunix_reverb.replay.wire_client import sample_stream

  decoder = decoder_lib.Decoder()
  channel = connection.open_channel(address)
  stream = sample_stream.SampleStream(channel, table)
  try:
    stream.request(2**31 - 1, _TIMEOUT_S)
    while True:
      for encoded in stream.read():
        yield decoder.decode(encoded)
  finally:
    stream.cancel()
    channel.close()


def _measure(
  call: Callable[[], object], finish: Callable[[], object], seconds: float
) -> Rate:
  """How often `call` returns, the time of `finish` at the end included."""
  for _ in range(_WARM_UP_ITEMS):
    call()
  finish()
  calls, lot = 0, 1
  start_s, start_cpu_s = time.perf_counter(), time.process_time()
  while (elapsed_s := time.perf_counter() - start_s) < seconds:
    for _ in range(lot):
      call()
    calls += lot
    if elapsed_s < 0.01 * seconds:
      lot *= 2
  finish()
  elapsed_s = time.perf_counter() - start_s
  return Rate(calls / elapsed_s, calls / (time.process_time() - start_cpu_s))


def _nothing() -> None:
  pass
