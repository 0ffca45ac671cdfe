"""Latency from insert to sampled under load, for `benchmarks.transport`.

Writers are processes of their own, of this module:

  python -m benchmarks.transport_tail '{"address": "localhost:1234", ...}'

Each writes items into the queue at a fixed rate, or as fast as it can, and
stamps each with the moment at which it was due: an item that is written late,
because those before it were blocked, counts from when it should have been.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import functools
import json
import subprocess
import sys
import time
from typing import Any
from typing import NamedTuple

import numpy as np

from benchmarks import transport_clients
from tunix_reverb.replay.wire_client import sampler as sampler_lib
from tunix_reverb.replay.wire_client import writer as writer_lib

TABLE = 'queue'
_PREFETCH = 16
_WINDOW = 32
_PROGRESS_S = 30.0
# For the writers to end.
_GRACE_S = 60.0
_WARM_UP = 0.2  # Of the seconds in which capacity is measured.
_QUANTILES = {'p50': 50.0, 'p99': 99.0, 'p99.9': 99.9}


class Load(NamedTuple):
  """Who writes what: items of `num_bytes` bytes and `length` transitions."""

  address: str
  num_bytes: int
  length: int
  num_writers: int


def measure_capacity(load: Load, seconds: float) -> float:
  """Items per second that come through when writers never pause."""
  due_s, sampled_s = _run(load, 0.0, seconds)
  start_s, end_s = due_s.min() + _WARM_UP * seconds, due_s.max()
  counted = np.count_nonzero((sampled_s > start_s) & (sampled_s < end_s))
  return counted / (end_s - start_s)


def measure_latencies(
  load: Load, items_per_s: float, seconds: float
) -> dict[str, float]:
  """Quantiles of the seconds from insert to sampled, and the items counted."""
  report = functools.partial(print, flush=True)
  due_s, sampled_s = _run(load, items_per_s, seconds, report)
  return {'items': len(due_s), **_quantiles(sampled_s - due_s)}


def _quantiles(latencies_s: np.ndarray) -> dict[str, float]:
  return {
    name: round(float(np.percentile(latencies_s, q)), 4)
    for name, q in _QUANTILES.items()
  }


def _run(
  load: Load,
  items_per_s: float,
  seconds: float,
  report: Callable[[str], Any] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """When each item was due and when it was sampled, epoch seconds.

  Args:
    load: of all writers together.
    items_per_s: likewise; 0: as many as they can.
    seconds: that they write.
    report: told of the progress.
  """
  period_s = load.num_writers / items_per_s if items_per_s else 0.0
  with contextlib.ExitStack() as stack:
    writers = [
      stack.enter_context(_writer(load)) for _ in range(load.num_writers)
    ]
    for writer in writers:
      if writer.stdout.readline() != 'ready\n':
        raise RuntimeError('a writer did not start')
    start_s = time.time() + 0.5
    times = {'period_s': period_s, 'end_s': start_s + seconds}
    for i, writer in enumerate(writers):
      times['due_s'] = start_s + i * period_s / load.num_writers
      writer.stdin.write(json.dumps(times) + '\n')
      writer.stdin.flush()
    times_s = _sample(load, start_s + seconds, report)
    for writer in writers:
      if writer.wait(_GRACE_S) != 0:
        raise RuntimeError(f'a writer ended with {writer.returncode}')
  return times_s


@contextlib.contextmanager
def _writer(load: Load) -> Iterator[Any]:
  with subprocess.Popen(
    [
      sys.executable,
      '-m',
      'benchmarks.transport_tail',
      json.dumps(load._asdict()),
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      yield process
    finally:
      process.kill()


def _sample(
  load: Load, end_s: float, report: Callable[[str], Any] | None
) -> tuple[np.ndarray, np.ndarray]:
  """Samples until nothing comes any more."""
  work = transport_clients.make_workload('', load.num_bytes, load.length, 0)
  sampler = sampler_lib.WireItemSampler(
    [load.address], columns=work.columns, table=TABLE, max_in_flight=_PREFETCH
  )
  due_s: list[float] = []
  sampled_s: list[float] = []
  next_report_s = time.time() + _PROGRESS_S
  with contextlib.closing(sampler):
    while True:
      item = sampler.sample(1.0)
      now_s = time.time()
      if item is None:
        if now_s > end_s:
          return np.array(due_s), np.array(sampled_s)
        continue
      due_s.append(item.trajectories.created_at_s[0])
      sampled_s.append(now_s)
      if report and now_s > next_report_s:
        next_report_s += _PROGRESS_S
        quantiles = _quantiles(np.array(sampled_s) - np.array(due_s))
        left_s = max(0.0, end_s - now_s)
        report(f'tail: {len(due_s)} items, {quantiles} s, {left_s:.0f} s left')


def _write(load: Load) -> None:
  """Writes until the end, at a fixed rate or as fast as it can."""
  work = transport_clients.make_workload('', load.num_bytes, load.length, 0)
  writer = writer_lib.WireItemWriter(
    load.address,
    columns=work.columns,
    table=TABLE,
    max_pending_items=_WINDOW,
  )
  print('ready', flush=True)
  times = json.loads(sys.stdin.readline())
  due_s = times['due_s']
  while due_s < times['end_s']:
    time.sleep(max(0.0, due_s - time.time()))
    item = work.item._replace(created_at_s=np.array([due_s]))
    if not writer.write(item, _GRACE_S):
      raise TimeoutError('the queue takes no items')
    due_s = due_s + times['period_s'] if times['period_s'] else time.time()
  if not writer.close(_GRACE_S):
    raise TimeoutError('the queue did not confirm all items')


if __name__ == '__main__':
  _write(Load(**json.loads(sys.argv[1])))
