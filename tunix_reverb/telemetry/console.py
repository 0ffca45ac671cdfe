"""The live view of a run: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
import sys
import time
from typing import Any

from tunix_reverb.telemetry import metrics
from tunix_reverb.telemetry import run_state

_PANEL_PERIOD_S = 0.5
_LINE_PERIOD_S = 5.0
_SPARKS = '▁▂▃▄▅▆▇█'
_SPARK_WIDTH = 32
_MAX_PROCESS_LINES = 12


@dataclasses.dataclass(frozen=True)
class Goal:
  """What the run is to reach, for the view.

  Attributes:
    environment: the environment's name.
    solved_return: mean evaluation return that solves it; infinity if none.
    run_dir: where everything is written.
  """

  environment: str
  solved_return: float
  run_dir: str


class Console:
  """Shows a run. Drawn by whoever calls `update`; it has no thread.

  with Console(goal) as console:
    console.update(state, statuses)  # As often as you like.
  """

  def __init__(self, goal: Goal, *, interactive: bool | None = None):
    """Creates a view.

    Args:
      goal: what the run is to reach.
      interactive: a panel instead of lines; by default if stdout is a
        terminal.
    """
    self._goal = goal
    self._interactive = (
      sys.stdout.isatty() if interactive is None else interactive
    )
    self._start_s = time.monotonic()
    self._next_s = 0.0
    self._live: Any = None

  def __enter__(self) -> Console:
    if self._interactive:
      from rich import live  # pylint: disable=g-import-not-at-top

      self._live = live.Live(auto_refresh=False)
      self._live.start()
    return self

  def __exit__(self, *exc_info: object) -> None:
    if self._live is not None:
      self._live.stop()
      self._live = None

  def say(self, text: str) -> None:
    """Prints one event; it stays on the screen."""
    text = f'[{self._elapsed_s():.0f} s] {text}'
    if self._live is not None:
      self._live.console.print(text, markup=False, highlight=False)
    else:
      print(text, flush=True)

  def update(
    self,
    state: run_state.RunState,
    statuses: Sequence[run_state.ProcessStatus],
    *,
    force: bool = False,
  ) -> None:
    """Redraws if it is time to; cheap otherwise."""
    now = time.monotonic()
    if now < self._next_s and not force:
      return
    elapsed_s = self._elapsed_s()
    if self._live is not None:
      self._next_s = now + _PANEL_PERIOD_S
      self._live.update(
        panel(state, statuses, self._goal, elapsed_s), refresh=True
      )
    else:
      self._next_s = now + _LINE_PERIOD_S
      print(line(state, statuses, elapsed_s), flush=True)

  def _elapsed_s(self) -> float:
    return time.monotonic() - self._start_s


def line(
  state: run_state.RunState,
  statuses: Sequence[run_state.ProcessStatus],
  elapsed_s: float,
) -> str:
  """The run in one line of plain text."""
  learner = metrics.LEARNER
  parts = [f'{elapsed_s:.0f} s']
  step = state.latest(learner, 'learner_step')
  if math.isnan(step):
    running = sum(s.state == 'running' for s in statuses)
    parts.append(f'starting ({running} of {len(statuses)} processes run)')
    parts += [f'{role}: {name}' for role, name in state.milestones.items()]
  else:
    parts += [
      f'step {step:.0f}',
      f'{number(state.latest(learner, "learner_steps_per_s"))} steps/s',
      f'{number(state.latest(learner, "transitions_per_s"))} transitions/s',
      f'learner {_utilisation(state)}',
      f'lag {_lag(state)}',
      f'recompiles {number(state.latest(learner, "recompiles_total"))}',
    ]
  if state.training_returns:
    parts.append(f'train {state.training_returns[-1]:.3g}')
  if state.evaluations:
    parts.append(f'evaluation {state.evaluations[-1].return_mean:.3g}')
  if state.drops():
    parts.append(f'dropped {_drops(state)}')
  restarts = sum(max(s.restarts, 0) for s in statuses)
  if restarts:
    parts.append(f'restarts {restarts}')
  return ' | '.join(parts)


def panel(
  state: run_state.RunState,
  statuses: Sequence[run_state.ProcessStatus],
  goal: Goal,
  elapsed_s: float,
) -> Any:
  """The run as a rich renderable."""
  from rich import panel as rich_panel  # pylint: disable=g-import-not-at-top
  from rich import table  # pylint: disable=g-import-not-at-top
  from rich import text  # pylint: disable=g-import-not-at-top

  grid = table.Table.grid(padding=(0, 2))
  grid.add_column(style='bold', no_wrap=True)
  grid.add_column()
  for name, value in rows(state, goal):
    grid.add_row(name, text.Text(value))
  grid.add_row('processes', text.Text(_processes(state, statuses)))
  return rich_panel.Panel(
    grid,
    title=f'{goal.environment}   {elapsed_s:.0f} s   {goal.run_dir}',
    title_align='left',
  )


def rows(state: run_state.RunState, goal: Goal) -> list[tuple[str, str]]:
  """Name and text of every line of the panel but the processes."""
  learner = metrics.LEARNER
  latest = lambda name: number(state.latest(learner, name))
  returns = [evaluation.return_mean for evaluation in state.evaluations]
  target = (
    f'   solved at {goal.solved_return:g}'
    if math.isfinite(goal.solved_return)
    else ''
  )
  acting = number(state.latest_sum(metrics.ACTOR, 'actor_steps_per_s'))
  return [
    ('evaluation', _returns(returns) + target),
    ('training', _returns(list(state.training_returns))),
    (
      'learner',
      f'step {latest("learner_step")}   '
      f'{latest("learner_steps_per_s")} steps/s   '
      f'{latest("transitions_per_s")} transitions/s   '
      f'total {latest("transitions_total")}',
    ),
    ('actors', f'{acting} steps/s'),
    ('learner time', _utilisation(state)),
    ('policy lag', f'{_lag(state)}   (mean/p50/p95/max, publishes)'),
    ('limiter', _limiter(state)),
    ('dropped', _drops(state) or 'none'),
    ('recompiles', latest('recompiles_total')),
  ]


def number(value: float) -> str:
  """A number as people read it: '-' for none, '35,200', '0.0312'."""
  if not math.isfinite(value):
    return '-' if math.isnan(value) else str(value)
  if abs(value) >= 100 or value == int(value):
    return f'{value:,.0f}'
  return f'{value:.3g}'


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
  """The last `width` values as blocks from their least to their greatest."""
  values = [v for v in values[-width:] if math.isfinite(v)]
  if not values:
    return ''
  low, high = min(values), max(values)
  scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
  return ''.join(_SPARKS[round((v - low) * scale)] for v in values)


def _returns(values: Sequence[float]) -> str:
  if not values:
    return '-'
  return f'{number(values[-1])}   {sparkline(values)}'


def _utilisation(state: run_state.RunState) -> str:
  parts = []
  for name in ('compute', 'waiting', 'publishing', 'other'):
    share = state.latest(metrics.LEARNER, f'utilisation_{name}')
    if not math.isnan(share):
      parts.append(f'{name} {share:.0%}')
  return ' '.join(parts) or '-'


def _lag(state: run_state.RunState) -> str:
  return '/'.join(
    number(state.latest(metrics.LEARNER, f'policy_lag_{name}'))
    for name in ('mean', 'p50', 'p95', 'max')
  )


def _limiter(state: run_state.RunState) -> str:
  latest = lambda name: state.latest_sum(metrics.REPLAY_SERVER, name)
  items, inserts, samples = (
    latest('table_items'),
    latest('inserts_blocked'),
    latest('samples_blocked'),
  )
  if math.isnan(items):
    return '-'
  if inserts > 0:
    balance = 'holds back inserts: actors are ahead'
  elif samples > 0:
    balance = 'holds back samples: the learner is ahead'
  else:
    balance = 'open'
  return f'{balance}   {items:.0f} items in the table'


def _drops(state: run_state.RunState) -> str:
  return ' '.join(f'{cause} {n:,}' for cause, n in state.drops().items())


def _processes(
  state: run_state.RunState, statuses: Sequence[run_state.ProcessStatus]
) -> str:
  lines = []
  # Those in trouble first: a long list is cut.
  ordered = sorted(statuses, key=lambda s: (s.pid > 0, s.restarts <= 0))
  for s in ordered[:_MAX_PROCESS_LINES]:
    what = f'pid {s.pid}   {s.age_s:.0f} s' if s.pid else s.state
    restarts = f'   restarts {s.restarts}' if s.restarts > 0 else ''
    milestone = state.milestones.get(s.name, '') if s.pid else ''
    lines.append(f'{s.name:<16} {what}{restarts}   {milestone}'.rstrip())
  if len(ordered) > _MAX_PROCESS_LINES:
    lines.append(f'... and {len(ordered) - _MAX_PROCESS_LINES} more')
  return '\n'.join(lines)
