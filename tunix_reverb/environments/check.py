"""Steps an environment with random actions and checks it against its specs."""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import time
import traceback
from typing import Any

import dm_env
from dm_env import specs
import numpy as np

from tunix_reverb import specs as specs_lib
from tunix_reverb import types
from tunix_reverb.environments import canonical
from tunix_reverb.environments import turns

_MAX_VIOLATIONS = 20
# What an unbounded float action is drawn from.
_UNBOUNDED_RANGE = (-1.0, 1.0)


@dataclasses.dataclass
class Report:
  """What `check` found.

  Attributes:
    violations: one line each, empty if the environment keeps its contract.
    num_steps: calls of `step` that were made.
    steps_per_s: of wall-clock time, random policy and checks excluded.
    returns: of the finished episodes.
    lengths: transitions of the finished episodes.
    num_truncations: episodes that ended with discount > 0.
  """

  violations: list[str] = dataclasses.field(default_factory=list)
  num_steps: int = 0
  steps_per_s: float = 0.0
  returns: list[float] = dataclasses.field(default_factory=list)
  lengths: list[int] = dataclasses.field(default_factory=list)
  num_truncations: int = 0


def sample_action(
  spec: specs.Array, generator: np.random.Generator, num: int | None = None
) -> Any:
  """A uniform action of a canonical spec; with `num`, an array [num, ...].

  A turn has as many tokens as it may have; whatever stops it may be among them.
  """
  shape = spec.shape if num is None else (num, *spec.shape)
  if turns.is_turn(spec):
    largest = int(np.max(spec.maximum))
    return generator.integers(largest + 1, size=shape).astype(np.int32)
  if spec.dtype.kind == 'f':
    low = np.where(np.isfinite(spec.minimum), spec.minimum, _UNBOUNDED_RANGE[0])
    high = np.where(
      np.isfinite(spec.maximum), spec.maximum, _UNBOUNDED_RANGE[1]
    )
    return generator.uniform(low, np.maximum(low, high), shape).astype(
      spec.dtype
    )
  action = generator.integers(
    spec.minimum, np.asarray(spec.maximum, np.int64) + 1, shape
  )
  return np.asarray(action).astype(spec.dtype)[()]


def check(
  environment: dm_env.Environment, *, num_steps: int, seed: int
) -> Report:
  """Steps `environment`, as its author made it, `num_steps` times.

  Args:
    environment: a fresh one; need not be canonical.
    num_steps: calls of `step`.
    seed: of the random actions.

  Returns:
    The report. An exception of the environment counts as a violation and ends
    the check.
  """
  checker = _Checker(environment)
  try:
    checker.run(num_steps, np.random.default_rng(seed))
  except Exception as e:  # pylint: disable=broad-except
    where = traceback.extract_tb(e.__traceback__)[-1]
    checker.violate(
      f'raised {type(e).__name__}: {e} ({where.filename}, line {where.lineno})'
    )
  return checker.report()


class _Checker:
  """The state of one check."""

  def __init__(self, environment: dm_env.Environment):
    self._environment = environment
    self._specs = specs_lib.make_environment_spec(environment)
    self._report = Report()
    # Violation -> (first step, count): the same one may recur every step.
    self._violations: dict[str, list[int]] = {}
    self._step = 0
    self._seconds = 0.0

  def run(self, num_steps: int, generator: np.random.Generator) -> None:
    """Steps through episodes; a fresh environment must start with FIRST."""
    action_map = canonical.ActionMap(self._specs.action)
    expect_first, episode_return, length = True, 0.0, 0
    for self._step in range(1, num_steps + 1):
      action = action_map(sample_action(action_map.spec, generator))
      timestep = self._timed(self._environment.step, action)
      self._check_order(timestep, expect_first)
      self._check_timestep(timestep)
      if timestep.step_type == dm_env.StepType.FIRST:
        episode_return, length = 0.0, 0
        self._check_specs()
      else:
        episode_return += float(timestep.reward)
        length += 1
      expect_first = timestep.step_type == dm_env.StepType.LAST
      if expect_first:
        self._report.returns.append(episode_return)
        self._report.lengths.append(length)
        self._report.num_truncations += bool(timestep.discount > 0)
    timestep = self._timed(self._environment.reset)
    if timestep.step_type != dm_env.StepType.FIRST:
      self.violate(f'reset() must return FIRST, not {timestep.step_type!r}')
    self._check_timestep(timestep)

  def _timed(self, call: Any, *args: Any) -> dm_env.TimeStep:
    start = time.perf_counter()
    timestep = call(*args)
    self._seconds += time.perf_counter() - start
    return timestep

  def violate(self, text: str) -> None:
    entry = self._violations.setdefault(text, [self._step, 0])
    entry[1] += 1

  def report(self) -> Report:
    self._report.num_steps = self._step
    self._report.steps_per_s = self._step / max(self._seconds, 1e-9)
    lines = [
      f'{text} (first at step {first}, {count} in all)'
      for text, (first, count) in self._violations.items()
    ]
    more = len(lines) - _MAX_VIOLATIONS
    if more > 0:
      lines[_MAX_VIOLATIONS:] = [f'and {more} more']
    self._report.violations = lines
    return self._report

  def _check_order(self, timestep: Any, expect_first: bool) -> None:
    if not isinstance(timestep, dm_env.TimeStep):
      raise TypeError(f'step() must return a dm_env.TimeStep, not {timestep!r}')
    if not isinstance(timestep.step_type, dm_env.StepType):
      self.violate(
        f'step_type ({timestep.step_type!r}) must be a dm_env.StepType'
      )
    is_first = timestep.step_type == dm_env.StepType.FIRST
    if expect_first and not is_first:
      self.violate(
        'step() of a fresh environment or after LAST must return FIRST, not '
        f'{timestep.step_type!r}'
      )
    if is_first and not expect_first:
      self.violate('FIRST must only follow LAST')

  def _check_timestep(self, timestep: dm_env.TimeStep) -> None:
    self._check_nest(
      'observation', timestep.observation, self._specs.observation
    )
    if timestep.step_type == dm_env.StepType.FIRST:
      for name in ('reward', 'discount'):
        if getattr(timestep, name) is not None:
          self.violate(f'{name} of FIRST must be None')
      return
    for name in ('reward', 'discount'):
      value = np.asarray(getattr(timestep, name))
      if value.shape != () or value.dtype.kind not in 'biuf':
        self.violate(f'{name} must be one number, not {value!r}')
      elif not np.isfinite(value):
        self.violate(f'{name} must be finite, not {value}')
      elif name == 'discount' and not 0.0 <= value <= 1.0:
        self.violate(f'discount ({value}) must be between 0 and 1')

  def _check_nest(self, path: str, value: Any, spec: types.Nest) -> None:
    if isinstance(spec, Mapping):
      if not isinstance(value, Mapping) or value.keys() != spec.keys():
        keys = list(value) if isinstance(value, Mapping) else type(value)
        self.violate(f'{path} must have the keys {list(spec)}, not {keys}')
        return
      for key, child in spec.items():
        self._check_nest(f'{path}/{key}', value[key], child)
    elif isinstance(spec, (tuple, list)):
      if not isinstance(value, (tuple, list)) or len(value) != len(spec):
        self.violate(f'{path} must have {len(spec)} parts, not {value!r}')
        return
      for i, child in enumerate(spec):
        self._check_nest(f'{path}/{i}', value[i], child)
    else:
      self._check_leaf(path, value, spec)

  def _check_leaf(self, path: str, value: Any, spec: specs.Array) -> None:
    array = np.asarray(value)
    if array.shape != spec.shape:
      self.violate(f'{path} must have shape {spec.shape}, not {array.shape}')
      return
    if array.dtype != spec.dtype:
      self.violate(f'{path} must be {spec.dtype}, not {array.dtype}')
    if array.dtype.kind == 'f' and not np.all(np.isfinite(array)):
      self.violate(f'{path} must be finite')
      return
    if isinstance(spec, specs.BoundedArray):
      if np.any(array < spec.minimum):
        self.violate(f'{path} must not be below its minimum {spec.minimum}')
      if np.any(array > spec.maximum):
        self.violate(f'{path} must not be above its maximum {spec.maximum}')

  def _check_specs(self) -> None:
    now = specs_lib.make_environment_spec(self._environment)
    for name, before, after in zip(now._fields, self._specs, now):
      if before != after:
        self.violate(
          f'{name}_spec must not change between episodes: {before} became '
          f'{after}'
        )


def describe(report: Report) -> list[str]:
  """Lines about the episodes and the speed."""
  lines = [f'{report.num_steps} steps, {report.steps_per_s:,.0f} steps/s']
  if not report.returns:
    return [*lines, 'no episode finished: num_steps is too small to see one']
  returns, lengths = np.asarray(report.returns), np.asarray(report.lengths)
  num = len(returns)
  return [
    *lines,
    f'{num} episodes: {num - report.num_truncations} terminated, '
    f'{report.num_truncations} truncated',
    f'return of the random policy: mean {returns.mean():.3f}, min '
    f'{returns.min():.3f}, max {returns.max():.3f}',
    f'length: mean {lengths.mean():.1f}, min {lengths.min()}, max '
    f'{lengths.max()} transitions',
  ]


def describe_columns(environment_spec: specs_lib.EnvironmentSpec) -> list[str]:
  """Lines about what an item stores, with bytes per transition.

  Args:
    environment_spec: of the canonical environment. In one of turns, each token
      is a transition.
  """
  has_turns = turns.is_turn(environment_spec.action)
  if has_turns:
    environment_spec = turns.stored_spec(environment_spec)
  columns = specs_lib.trajectories_spec(environment_spec, has_turns=has_turns)
  per_transition = set(types.Trajectories._fields) - {
    'core_state',
    'lengths',
    'created_at_s',
    'actor_id',
    'episode_id',
    'truncated',
    'permit_id',
  }
  totals: collections.Counter[str] = collections.Counter()
  lines = []
  for name, column in specs_lib.flatten_columns(columns).items():
    unit = (
      'transition' if name.split('/')[0] in per_transition else 'trajectory'
    )
    shape = column.shape[1:]
    num_bytes = column.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    totals[unit] += num_bytes
    lines.append(
      f'{name:28} {column.dtype!s:8} {list(shape)!s:14} '
      f'{num_bytes:7,} bytes per {unit}'
    )
  lines.append(
    f'in all {totals["transition"]:,} bytes per transition (observations '
    f'have one more per trajectory) and {totals["trajectory"]:,} per '
    'trajectory'
  )
  return lines
