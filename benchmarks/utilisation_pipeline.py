"""The pipeline of `benchmarks.utilisation`: a run of `launch.local`, watched.

What the learner does with its time is the sum of what its reports say, each
over its own interval; CPU time is that of the processes of each role.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import itertools
import pathlib
import signal
import subprocess
import sys
import time

import psutil

from tunix_reverb.telemetry import reader as reader_lib

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 60.0
_POLL_S = 0.1
_UTILISATION = 'utilisation_'
_DROPPED = tuple(f'dropped_{c}_total' for c in ('lag', 'age', 'poison'))


@dataclasses.dataclass
class Watched:
  """What was seen of a run, from the learner's first report with an update.

  Attributes:
    learner: its rows, the first of them where the window begins.
    actor: rows of actors in the window.
    first_update_s: from the command to that first report.
    cpu_s: CPU seconds in the window, by role.
  """

  learner: list[reader_lib.Row]
  actor: list[reader_lib.Row]
  first_update_s: float
  cpu_s: dict[str, float]


def watch(
  run_dir: pathlib.Path,
  config_flags: Sequence[str],
  *,
  seconds: float,
  on_row: Callable[[reader_lib.Row], None],
) -> Watched:
  """Runs `launch.local` for `seconds` of learning, in steady state.

  Args:
    run_dir: of the run.
    config_flags: of the run.
    seconds: from the first update on.
    on_row: is told of every row of the learner.
  """
  began_s = time.monotonic()
  local = subprocess.Popen(
    [
      sys.executable, '-m', 'launch.local', f'--run_dir={run_dir}',
      *config_flags,
    ],
    stdout=subprocess.DEVNULL,
  )  # fmt: skip
  try:
    reader = reader_lib.Reader(run_dir)
    first = _wait_for_update(reader, local)
    before_s, first_update_s = cpu_by_role(local.pid), time.monotonic()
    watched = Watched([first], [], first_update_s - began_s, {})
    while time.monotonic() - first_update_s < seconds:
      time.sleep(_POLL_S)
      if local.poll() is not None:
        raise RuntimeError(f'launch.local ended with {local.returncode}')
      for row in reader.poll():
        if row.role == 'learner':
          watched.learner.append(row)
          on_row(row)
        elif row.role.startswith('actor'):
          watched.actor.append(row)
    after_s = cpu_by_role(local.pid)
    watched.cpu_s = {
      role: after_s[role] - before_s.get(role, 0.0) for role in after_s
    }
    return watched
  finally:
    local.send_signal(signal.SIGINT)
    local.wait(timeout=_END_TIMEOUT_S)


def _wait_for_update(
  reader: reader_lib.Reader, local: subprocess.Popen
) -> reader_lib.Row:
  deadline_s = time.monotonic() + _START_TIMEOUT_S
  while time.monotonic() < deadline_s:
    for row in reader.poll():
      if row.role == 'learner' and row.values['learner_step'] >= 1:
        return row
    if local.poll() is not None:
      raise RuntimeError(f'launch.local ended with {local.returncode}')
    time.sleep(_POLL_S)
  raise TimeoutError(f'no update within {_START_TIMEOUT_S:g} s')


def cpu_by_role(pid: int) -> dict[str, float]:
  """CPU seconds of a `launch.local` and of each kind of role below it."""
  seconds: dict[str, float] = {}
  root = psutil.Process(pid)
  for process in [root, *root.children(recursive=True)]:
    try:
      times, words = process.cpu_times(), process.cmdline()
    except psutil.NoSuchProcess:
      continue
    role = next((w[7:] for w in words if w.startswith('launch.')), 'other')
    seconds[role] = seconds.get(role, 0.0) + times.user + times.system
  return seconds


def figures(watched: Watched) -> dict[str, object]:
  """Of the window: updates, tokens, where the learner's time went, lags."""
  rows = watched.learner
  first, last = rows[0], rows[-1]
  wall_s = last.time_s - first.time_s
  gained = lambda name: last.values[name] - first.values[name]
  spans = [(b.time_s - a.time_s, b.values) for a, b in itertools.pairwise(rows)]
  shares = {
    name.removeprefix(_UTILISATION): sum(t * v[name] for t, v in spans) / wall_s
    for name in last.values
    if name.startswith(_UTILISATION)
  }
  hold = gained('admission_hold_s_total') / wall_s
  shares['admission'] = min(hold, shares['waiting'])
  shares['starved'] = shares.pop('waiting') - shares['admission']
  lags = [v for _, v in spans if 'policy_lag_mean' in v]
  return {
    'wall_s': wall_s,
    'updates': int(gained('learner_step')),
    'tokens': int(gained('transitions_total')),
    'shares': shares,
    'cpu_s': watched.cpu_s,
    'first_update_s': watched.first_update_s,
    'policy_lag_mean': sum(v['policy_lag_mean'] for v in lags) / len(lags),
    'policy_lag_max': max(v['policy_lag_max'] for v in lags),
    'batch_fill': sum(v['batch_fill'] for v in lags) / len(lags),
    'ess': sum(v['ess'] for v in lags) / len(lags),
    'dropped': int(sum(last.values[name] for name in _DROPPED)),
    'recompiles': int(last.values.get('recompiles_total', 0)),
  }


def curve(watched: Watched) -> list[tuple[float, float]]:
  """(seconds since the window began, mean return) of each actor's report."""
  begin_s = watched.learner[0].time_s
  return [
    (row.time_s - begin_s, row.values['episode_return_mean'])
    for row in watched.actor
    if row.time_s >= begin_s and 'episode_return_mean' in row.values
  ]
