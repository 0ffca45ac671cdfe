"""The whole pipeline's speed against the sum of its unavoidable parts.

  python -m benchmarks.pipeline [--environments=bsuite:catch/0,...] [--runs=3]

For each environment, in turns, `runs` times: the transitions learnt per own
CPU-second of the whole process tree (replay server, 2 actors x 32
environments, learner, supervisor) of a real `launch.local` run between its
first reports and its end, and the parts measured alone (`benchmarks.parts`).
The additive ceiling is 1 / (1/env + 1/act + 1/learn); the ratio is what the
transport, the batching and everything else leave of it. Medians of the runs.
Batches are of 8,000 positions, twice the default, in every part and run; Catch
and CartPole are solved with them, too.
"""

from __future__ import annotations

import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
import psutil

from tunix_reverb.telemetry import reader as reader_lib

_ENVIRONMENTS = flags.DEFINE_list(
  'environments',
  ['bsuite:catch/0', 'gym:CartPole-v1', 'envpool:CartPole-v1'],
  'Environments to measure.',
)
_RUNS = flags.DEFINE_integer('runs', 3, 'Runs per environment.')
_SECONDS = flags.DEFINE_float(
  'seconds', 10.0, 'Measured part of each run, seconds of wall time.'
)
_TARGET = 0.6
_START_TIMEOUT_S = 120.0
_PARTS = ('env', 'act', 'learn')


def _config_flags(environment: str) -> list[str]:
  return [
    f'--environment={environment}',
    '--num_actors=2',
    '--environments_per_actor=32',
    '--hidden_sizes=64,64',
    '--batch_positions=8000',
    '--item_bytes=524288',
    '--evaluation_period_s=0',
    '--learner_checkpoint_period_s=0',
    '--replay_checkpoint_period_s=0',
  ]


def _measure_part(part: str, environment: str) -> float:
  """Transitions per CPU-second of one part alone."""
  result = subprocess.run(
    [
      sys.executable, '-m', 'benchmarks.parts', f'--part={part}',
      *_config_flags(environment),
    ],
    capture_output=True,
    text=True,
    timeout=_START_TIMEOUT_S,
    check=False,
  )  # fmt: skip
  if result.returncode:
    raise RuntimeError(f'{part} of {environment} failed: {result.stderr}')
  return json.loads(result.stdout.splitlines()[-1])['transitions_per_cpu_s']


class _CpuMeter:
  """CPU seconds of a process and all its descendants, dead ones included."""

  def __init__(self, pid: int):
    self._root = psutil.Process(pid)
    self._seen: dict[int, float] = {}

  def read_s(self) -> float:
    """Seconds used since the start."""
    for process in [self._root, *self._root.children(recursive=True)]:
      try:
        times = process.cpu_times()
      except psutil.NoSuchProcess:
        continue
      self._seen[process.pid] = times.user + times.system
    return sum(self._seen.values())


def _learner_total(reader: reader_lib.Reader) -> float | None:
  """`transitions_total` if the learner has reported since the last call."""
  total = None
  for row in reader.poll():
    if row.role == 'learner':
      total = row.values['transitions_total']
  return total


def _wait_for_report(reader, local: subprocess.Popen) -> float:
  deadline_s = time.monotonic() + _START_TIMEOUT_S
  while time.monotonic() < deadline_s:
    total = _learner_total(reader)
    if total is not None:
      return total
    if local.poll() is not None:
      raise RuntimeError(f'launch.local ended with {local.returncode}')
    time.sleep(0.01)
  raise TimeoutError('the learner did not report in time')


def _measure_pipeline(environment: str, seconds: float) -> float:
  """Transitions learnt per CPU-second of the whole tree, in steady state."""
  with tempfile.TemporaryDirectory() as directory:
    run_dir = pathlib.Path(directory) / 'run'
    local = subprocess.Popen(
      [
        sys.executable, '-m', 'launch.local', f'--run_dir={run_dir}',
        *_config_flags(environment),
      ],
      stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
      meter = _CpuMeter(local.pid)
      reader = reader_lib.Reader(run_dir)
      for _ in range(3):  # The start, with its imports, is over by then.
        first = _wait_for_report(reader, local)
      cpu_s, wall_s = meter.read_s(), time.monotonic()
      last = first
      while time.monotonic() - wall_s < seconds:
        last = _wait_for_report(reader, local)
        last_cpu_s = meter.read_s()
      return (last - first) / (last_cpu_s - cpu_s)
    finally:
      local.send_signal(signal.SIGINT)
      local.wait(timeout=30)


def _measure(environment: str) -> dict[str, float]:
  """Medians of the parts and the pipeline, and of their ratio."""
  rates: dict[str, list[float]] = {}
  ratios, ceilings = [], []
  for run in range(_RUNS.value):
    parts = {part: _measure_part(part, environment) for part in _PARTS}
    pipeline = _measure_pipeline(environment, _SECONDS.value)
    ceiling = 1.0 / sum(1.0 / rate for rate in parts.values())
    ratios.append(pipeline / ceiling)
    ceilings.append(ceiling)
    for name, rate in {**parts, 'pipeline': pipeline}.items():
      rates.setdefault(name, []).append(rate)
    print(
      f'{environment} run {run + 1}/{_RUNS.value}: '
      + ', '.join(f'{part} {rate:,.0f}' for part, rate in parts.items())
      + f' -> ceiling {ceiling:,.0f}; pipeline {pipeline:,.0f} transitions per '
      f'CPU-second; ratio {pipeline / ceiling:.2f}',
      flush=True,
    )
  result = {name: statistics.median(values) for name, values in rates.items()}
  result['ceiling'] = statistics.median(ceilings)
  result['ratio'] = statistics.median(ratios)
  return result


def main(argv: list[str]) -> None:
  """Measures every environment and prints one line of JSON at the end."""
  del argv
  results = {name: _measure(name) for name in _ENVIRONMENTS.value}
  checks = {
    f'ratio_{name}': {
      'value': round(result['ratio'], 3),
      'target': _TARGET,
      'ok': result['ratio'] >= _TARGET,
    }
    for name, result in results.items()
  }
  print(
    json.dumps(
      {
        'benchmark': 'pipeline',
        'checks': checks,
        'transitions_per_cpu_s': {
          name: {
            part: round(rate) for part, rate in r.items() if part != 'ratio'
          }
          for name, r in results.items()
        },
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
