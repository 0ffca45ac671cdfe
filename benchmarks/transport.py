"""The wire client against the official one, and the tail of its latency.

  python -m benchmarks.transport [--runs=9] [--seconds=2] [--tail_s=300]

Both clients insert into and sample from the same server, which is a process of
its own, whole trajectories of 1 kB, 50 kB and 1 MB, in turns; each size has a
fresh server, because one that has served millions of items is slower, to either
client. The ratios are
medians over pairs of runs that follow each other: items per second, and items
per CPU-second of the client's process. The official client is taken at its
best: its legacy writer with whole arrays, and its low-level sampler, without
any checks. The wire client's inserts are those of `WireItemWriter`, checks
included; its samples are arrays, as the official ones are. What the checks of
`WireItemSampler` cost is printed beside.

Then the latency from insert to sampled, of 8 writer processes and 1 sampler at
70% of what these bring through.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import json
import os
import statistics
import subprocess
import sys

from absl import app
from absl import flags

from benchmarks import transport_clients
from benchmarks import transport_tail

_RUNS = flags.DEFINE_integer('runs', 9, 'Pairs of runs to take medians of.')
_SECONDS = flags.DEFINE_float('seconds', 2.0, 'Length of a run, seconds.')
_SIZES = flags.DEFINE_list('sizes', ['1kB', '50kB', '1MB'], 'Sizes to measure.')
_TAIL_S = flags.DEFINE_float(
  'tail_s', 300.0, 'Length of the run that measures latency, seconds; 0: none.'
)
_TAIL_SIZE = flags.DEFINE_string('tail_size', '50kB', 'Size of its items.')
_TAIL_WRITERS = flags.DEFINE_integer('tail_writers', 8, 'Its writers.')
_TAIL_LOAD = flags.DEFINE_float('tail_load', 0.7, 'Its load over the capacity.')

# Bytes, transitions, and items in the table.
_WORKLOADS = {
  '1kB': (1000, 8, 5000),
  '50kB': (50_000, 64, 1000),
  '1MB': (1_000_000, 256, 100),
}
_QUEUE_ITEMS = 100
_CAPACITY_S = 10.0

# Ratios of items per second to reach, by operation and size; the same per
# CPU-second.
_TARGETS = {
  ('insert', '1kB'): 1.3,
  ('insert', '50kB'): 1.1,
  ('insert', '1MB'): 0.8,
  ('sample', '1kB'): 0.8,
  ('sample', '50kB'): 1.0,
  ('sample', '1MB'): 1.0,
}
_CPU_TARGET = 0.75

# The first is compared with the second; others are only printed.
_CLIENTS: dict[str, dict[str, Callable[..., transport_clients.Rate]]] = {
  'insert': {
    'wire': transport_clients.insert_wire,
    'official': transport_clients.insert_official,
  },
  'sample': {
    'wire': transport_clients.sample_wire_arrays,
    'official': transport_clients.sample_official,
    'wire, checked': transport_clients.sample_wire,
  },
}


@contextlib.contextmanager
def _server() -> Iterator[str]:
  """A server in a process of its own; its address."""
  works = [_workload(size) for size in _WORKLOADS]
  tables = {work.table: work.max_items for work in works}
  process = subprocess.Popen(
    [
      sys.executable, '-W', 'ignore', '-m', 'benchmarks.transport_server',
      json.dumps(tables), str(_QUEUE_ITEMS),
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )  # fmt: skip
  with process:
    assert process.stdout is not None
    yield f'localhost:{int(process.stdout.readline())}'
    process.communicate(timeout=30)


def _workload(size: str) -> transport_clients.Workload:
  num_bytes, length, max_items = _WORKLOADS[size]
  return transport_clients.make_workload(size, num_bytes, length, max_items)


def _measure(
  address: str, operation: str, size: str
) -> dict[str, list[transport_clients.Rate]]:
  """The rates of each client, run after run."""
  work, clients = _workload(size), _CLIENTS[operation]
  rates: dict[str, list[transport_clients.Rate]] = {c: [] for c in clients}
  for _ in range(_RUNS.value):
    for client, function in clients.items():
      rates[client].append(function(address, work, _SECONDS.value))
  for client, runs in rates.items():
    per_s = statistics.median(rate.per_s for rate in runs)
    per_cpu_s = statistics.median(rate.per_cpu_s for rate in runs)
    print(
      f'{operation} {size:>5}  {client:14} {per_s:9.0f} items/s '
      f'{per_cpu_s:9.0f} per CPU-second',
      flush=True,
    )
  return rates


def _checks(
  operation: str, size: str, rates: dict[str, list[transport_clients.Rate]]
) -> dict[str, dict[str, object]]:
  """The ratios of one operation and size against their targets."""
  checks = {}
  for name, index, target in (
    ('items_per_s', 0, _TARGETS[operation, size]),
    ('items_per_cpu_s', 1, _CPU_TARGET),
  ):
    ratio = statistics.median(
      ours[index] / theirs[index]
      for ours, theirs in zip(rates['wire'], rates['official'])
    )
    checks[f'{operation}_{size}_{name}'] = {
      'value': round(ratio, 2),
      'target': target,
      'ok': ratio >= target,
    }
  return checks


def _measure_tail(address: str) -> dict[str, float]:
  num_bytes, length, _ = _WORKLOADS[_TAIL_SIZE.value]
  load = transport_tail.Load(address, num_bytes, length, _TAIL_WRITERS.value)
  capacity = transport_tail.measure_capacity(load, _CAPACITY_S)
  rate = _TAIL_LOAD.value * capacity
  print(
    f'tail: {_TAIL_WRITERS.value} writers bring {capacity:.0f} items/s of '
    f'{_TAIL_SIZE.value} through; {_TAIL_S.value:g} s at {rate:.0f} items/s',
    flush=True,
  )
  latencies = transport_tail.measure_latencies(load, rate, _TAIL_S.value)
  return {'capacity_items_per_s': round(capacity), **latencies}


def main(argv: list[str]) -> None:
  """Measures and prints one line of JSON at the end."""
  del argv
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  result: dict[str, object] = {'benchmark': 'transport'}
  checks: dict[str, object] = {}
  for size in _SIZES.value:
    with _server() as address:
      for operation in _CLIENTS:  # What is inserted is sampled then.
        rates = _measure(address, operation, size)
        checks |= _checks(operation, size, rates)
        result[f'{operation}_{size}_items_per_s'] = {
          client: round(statistics.median(rate.per_s for rate in runs))
          for client, runs in rates.items()
        }
  if _TAIL_S.value:
    with _server() as address:
      result['insert_to_sampled_s'] = _measure_tail(address)
  print(json.dumps(result | {'checks': checks}))


if __name__ == '__main__':
  app.run(main)
