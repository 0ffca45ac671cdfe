"""Time from the command to the first learned batch, and where it goes.

  python -m benchmarks.startup [--environment=catch] [--runs=3]

`runs` times: processes that only import something, then a real `launch.local`
run, which ends once its learner has learnt a batch. Prints for each role the
seconds from the command to each of its milestones, medians of the runs. Checks:

- the first learned batch over the imports of Reverb and JAX in the same run:
  what a user waits beyond what every Reverb and JAX program costs;
- the imports of our actor's and of our learner's modules over `import reverb`,
  in CPU-seconds, which other processes disturb less.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import pkgutil
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags

from tunix_reverb.telemetry import milestones

_ENVIRONMENT = flags.DEFINE_string(
  'environment', 'catch', 'Environment of the run.'
)
_RUNS = flags.DEFINE_integer('runs', 3, 'Runs to take medians of.')
# Five processes import Reverb and JAX at the same time: on two cores that alone
# takes 2.5 times the imports of one. As much again is left for reading the
# environment, compiling, the first variables and the first batch.
_TARGET = 5.0
_IMPORT_TARGET = 0.333
_START_TIMEOUT_S = 120.0
_END = 'learnt its first batch'
_BASE = 'reverb, jax'


def _modules(package: str) -> str:
  """Every module of a package but its contract tests, to be imported."""
  path = importlib.import_module(package).__path__
  return ', '.join(
    f'{package}.{module.name}'
    for module in pkgutil.iter_modules(path)
    if module.name != 'test_utils'
  )


_IMPORTS = {
  'base': _BASE,
  'reverb': 'reverb',
  'actor': _modules('tunix_reverb.actor'),
  'learner': _modules('tunix_reverb.learner'),
}


def _measure_import(modules: str) -> tuple[float, float]:
  """(wall, CPU) seconds of a process that imports `modules`."""
  before, start_s = os.times(), time.monotonic()
  environ = {'TF_CPP_MIN_LOG_LEVEL': '3', 'TF_ENABLE_ONEDNN_OPTS': '0'}
  subprocess.run(
    [sys.executable, '-W', 'ignore', '-c', f'import {modules}'],
    env=os.environ | environ,
    timeout=_START_TIMEOUT_S,
    check=True,
  )
  wall_s, after = time.monotonic() - start_s, os.times()
  cpu_s = sum(after[2:4]) - sum(before[2:4])
  return wall_s, cpu_s


def _measure_start(environment: str) -> dict[tuple[str, str], float]:
  """Seconds from the command to each (role, milestone) of a run."""
  with tempfile.TemporaryDirectory() as directory:
    run_dir = pathlib.Path(directory) / 'run'
    start_s = time.time()
    local = subprocess.Popen(
      [
        sys.executable, '-m', 'launch.local', f'--run_dir={run_dir}',
        f'--environment={environment}', '--solved_return=inf',
      ],
      stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
      deadline_s = time.monotonic() + _START_TIMEOUT_S
      marks: list = []
      while not any(mark['name'] == _END for mark in marks):
        if local.poll() is not None:
          raise RuntimeError(f'launch.local ended with {local.returncode}')
        if time.monotonic() > deadline_s:
          raise TimeoutError(f'the learner has not {_END} in time')
        time.sleep(0.05)
        marks = milestones.read(run_dir)
    finally:
      local.send_signal(signal.SIGINT)
      local.wait(timeout=30)
  # The port differs from run to run.
  return {
    (m['role'], re.sub(r' on port \d+', '', m['name'])): m['time_s'] - start_s
    for m in marks
  }


def _print_table(medians: dict[tuple[str, str], float]) -> None:
  roles = sorted({role for role, _ in medians}, key=_order)
  print('seconds from the command to')
  for role in roles:
    print(f'  {role}')
    for (owner, name), seconds in sorted(medians.items(), key=lambda m: m[1]):
      if owner == role:
        print(f'    {name:36} {seconds:6.2f}')


def _order(role: str) -> tuple[bool, str]:
  return not role.startswith(('learner', 'replay')), role


def _check(value: float, target: float) -> dict[str, float | bool]:
  return {'value': round(value, 3), 'target': target, 'ok': value <= target}


def _print_result(
  imports: list[dict[str, tuple[float, float]]],
  starts: list[dict[tuple[str, str], float]],
) -> None:
  """One line of JSON: the checks and the medians they come from."""
  medians = {
    key: statistics.median(start[key] for start in starts if key in start)
    for key in set().union(*starts)
  }
  _print_table(medians)
  walls_s = [run['base'][0] for run in imports]
  cpu_s = {
    name: statistics.median(run[name][1] for run in imports)
    for name in _IMPORTS
  }
  ratio = statistics.median(
    start['learner', _END] / wall_s for start, wall_s in zip(starts, walls_s)
  )
  checks = {'first_learned_batch_over_imports': _check(ratio, _TARGET)}
  for role in ('actor', 'learner'):
    ratio = statistics.median(
      run[role][1] / run['reverb'][1] for run in imports
    )
    checks[f'{role}_imports_over_reverb'] = _check(ratio, _IMPORT_TARGET)
  print(
    json.dumps(
      {
        'benchmark': 'startup',
        'checks': checks,
        'first_learned_batch_s': round(medians['learner', _END], 2),
        'imports_wall_s': round(statistics.median(walls_s), 2),
        'imports_cpu_s': {n: round(s, 2) for n, s in cpu_s.items()},
      }
    )
  )


def main(argv: list[str]) -> None:
  """Measures and prints one line of JSON at the end."""
  del argv
  imports: list[dict[str, tuple[float, float]]] = []
  starts: list[dict[tuple[str, str], float]] = []
  for run in range(_RUNS.value):
    imports.append({n: _measure_import(m) for n, m in _IMPORTS.items()})
    starts.append(_measure_start(_ENVIRONMENT.value))
    wall_s, cpu_s = imports[-1]['base']
    first_s = starts[-1]['learner', _END]
    print(
      f'run {run + 1}/{_RUNS.value}: imports alone {wall_s:.2f} s '
      f'({cpu_s:.2f} s of CPU), first learned batch {first_s:.2f} s, '
      f'ratio {first_s / wall_s:.2f}',
      flush=True,
    )
  _print_result(imports, starts)


if __name__ == '__main__':
  app.run(main)
