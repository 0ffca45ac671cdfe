"""The account given at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
import math
from typing import Any

from tunix_reverb.telemetry import console
from tunix_reverb.telemetry import logger
from tunix_reverb.telemetry import metrics
from tunix_reverb.telemetry import run_state

# Drops are called biased when the longer half of all trajectories has so many
# times more than the shorter one.
_BIAS = 2.0


def make(
  state: run_state.RunState,
  *,
  reason: str,
  solved: bool | None,
  wall_s: float,
  restarts: Mapping[str, int],
) -> dict[str, Any]:
  """The summary as plain data, ready for JSON.

  Args:
    state: everything the roles reported.
    reason: why the run ended.
    solved: whether `solved_return` was reached; None if there was none.
    wall_s: seconds the run took.
    restarts: by process name.
  """
  learner = metrics.LEARNER
  last = state.evaluations[-1] if state.evaluations else None
  values = {
    'evaluation_return_mean': last.return_mean if last else math.nan,
    'evaluation_return_std': last.return_std if last else math.nan,
    'evaluation_episodes': last.episodes if last else 0,
    'training_return_mean': (
      state.training_returns[-1] if state.training_returns else math.nan
    ),
    'wall_s': round(wall_s, 1),
    **{
      name: state.latest(learner, name)
      for name in (
        'learner_step',
        'policy_version',
        'transitions_total',
        'recompiles_total',
        'compile_s',
        'non_finite_updates_total',
      )
    },
    'learner_steps_per_s': state.rate(learner, 'learner_step'),
    'transitions_per_s': state.rate(learner, 'transitions_total'),
    'actor_steps_total': state.latest_sum(metrics.ACTOR, 'actor_steps_total'),
    **{
      f'utilisation_{name}': state.mean(learner, f'utilisation_{name}')
      for name in ('compute', 'waiting', 'publishing', 'other')
    },
    'policy_lag_mean': state.mean(learner, 'policy_lag_mean'),
    'policy_lag_p95': state.mean(learner, 'policy_lag_p95'),
    'policy_lag_max': state.maximum(learner, 'policy_lag_max'),
  }
  return {
    'reason': reason,
    'solved': solved,
    **{name: _json(value) for name, value in values.items()},
    'dropped': state.drops(),
    'dropped_by_length_decile': state.drops_by_decile(),
    'restarts': dict(restarts),
  }


def as_text(summary: Mapping[str, Any]) -> str:
  """The summary for people: a dozen lines, fewer if nothing was learnt."""
  lines = [('ended', summary['reason'])]
  if summary['learner_step'] is None:
    lines.append(('learnt', 'nothing yet'))
  else:
    lines += _learnt(summary)
  lines += [
    ('restarts', _counts(summary['restarts'])),
    ('wall time', f'{summary["wall_s"]:.1f} s'),
  ]
  return '\n'.join(f'  {name:<19}{text}' for name, text in lines)


def _learnt(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Name and text of the lines about what was learnt, and how fast."""
  show = lambda name: _show(summary[name])
  share = lambda name: _share(summary[f'utilisation_{name}'])
  solved = {None: 'no threshold set', True: 'yes', False: 'no'}
  return [
    ('solved', solved[summary['solved']]),
    (
      'evaluation return',
      f'{show("evaluation_return_mean")} +- {show("evaluation_return_std")} '
      f'over {show("evaluation_episodes")} episodes',
    ),
    ('training return', show('training_return_mean')),
    (
      'learner steps',
      f'{show("learner_step")} ({show("learner_steps_per_s")}/s)',
    ),
    (
      'transitions learnt',
      f'{show("transitions_total")} ({show("transitions_per_s")}/s)',
    ),
    (
      'learner time',
      f'compute {share("compute")}, waiting {share("waiting")}, '
      f'publishing {share("publishing")}, other {share("other")}',
    ),
    (
      'policy lag',
      f'mean {show("policy_lag_mean")}, p95 {show("policy_lag_p95")}, '
      f'max {show("policy_lag_max")} publishes',
    ),
    ('dropped', _counts(summary['dropped'])),
    *_dropped_by_length(summary),
    ('recompiles', show('recompiles_total')),
  ]


def _dropped_by_length(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
  """The line that shows whether being dropped depends on the length."""
  if not {'lag', 'age'} & set(summary['dropped']):
    return []  # What a shutdown drops is whatever was under way.
  counts = summary['dropped_by_length_decile']
  half = len(counts) // 2
  text = ' '.join(f'{n:,}' for n in counts)
  text += ' (tenths of all lengths, shortest to longest)'
  if sum(counts[half:]) > _BIAS * sum(counts[:half]):
    text += (
      ': long trajectories are lost more often, and what is learnt is biased '
      'towards short ones; --admission loses none'
    )
  return [('dropped by length', text)]


def _json(value: float) -> float | str | None:
  """A missing value (NaN) is null."""
  return None if math.isnan(value) else logger.to_json(value)


def _show(value: float | str | None) -> str:
  return '-' if value is None else console.number(float(value))


def _share(value: float | None) -> str:
  return '-' if value is None else f'{value:.0%}'


def _counts(counts: Mapping[str, int]) -> str:
  return ', '.join(f'{name} {n:,}' for name, n in counts.items()) or 'none'
