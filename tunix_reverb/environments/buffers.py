"""K timesteps written into preallocated arrays, at the least cost per step.

Letters: N environments, K <= N of them answering.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dm_env
from dm_env import specs
import numpy as np

from tunix_reverb import types

_FIRST, _MID, _LAST = dm_env.StepType


class TimestepBuffers:
  """Arrays for N timesteps, reused by every `write`."""

  def __init__(self, observation_spec: types.Nest, num_environments: int):
    """Args:
    observation_spec: a canonical one (see `canonical`).
    num_environments: N.
    """
    self._step_type = np.zeros(num_environments, np.int32)
    self._reward = np.zeros(num_environments, np.float32)
    self._discount = np.zeros(num_environments, np.float32)
    self._columns = _columns(observation_spec, num_environments)

  def write(
    self,
    step_types: tuple,
    rewards: tuple,
    discounts: tuple,
    observations: tuple,
  ) -> dm_env.TimeStep:
    """Batches K timesteps, given field by field: `write(*zip(*timesteps))`.

    Args:
      step_types, rewards, discounts: K each. Of FIRST, reward and discount are
        ignored.
      observations: K; dtypes may be others of the same kind.

    Returns:
      A `TimeStep` of views: step_type int32 [K], reward f32 [K], discount f32
      [K], observation nest of [K, ...]. FIRST has reward 0 and discount 1.

    Raises:
      ValueError: an observation differs from its spec.
    """
    num = len(step_types)
    step_type, reward = self._step_type[:num], self._reward[:num]
    discount = self._discount[:num]
    if step_types.count(_MID) == num:
      # NumPy takes 100 ns to read an enum member; most batches are all MID.
      step_type.fill(1)
    else:
      step_type[:] = [int(s) for s in step_types]
      first = [s == _FIRST for s in step_types]
      rewards = [0.0 if f else r for f, r in zip(first, rewards)]
      discounts = [1.0 if f else d for f, d in zip(first, discounts)]
    reward[:] = rewards
    if discounts.count(1.0) == num:
      discount.fill(1.0)
    else:
      discount[:] = discounts
    observation = _write(self._columns, observations)
    return dm_env.TimeStep(step_type, reward, discount, observation)


class _Column:
  """One observation leaf of N environments."""

  def __init__(self, spec: specs.Array, num_environments: int):
    self._spec = spec
    self._array = np.zeros((num_environments, *spec.shape), spec.dtype)
    # Concatenating into the array with its two leading dims merged is the
    # fastest way in: a third less than row by row, and it casts.
    self._flat = None
    if spec.shape:
      self._flat = self._array.reshape((-1, *spec.shape[1:]))

  def write(self, values: Sequence[Any]) -> np.ndarray:
    """Copies K values in and returns the view of them."""
    num = len(values)
    try:
      if self._flat is None:
        self._array[:num] = values
      else:
        rows = num * self._spec.shape[0]
        np.concatenate(values, out=self._flat[:rows], casting='same_kind')
    except (TypeError, ValueError) as e:
      raise ValueError(self._explain(values)) from e
    return self._array[:num]

  def _explain(self, values: Sequence[Any]) -> str:
    found = sorted(
      {f'{np.asarray(v).dtype}{list(np.shape(v))}' for v in values}
    )
    spec = self._spec
    return (
      f'observation {spec.name!r} must be {spec.dtype}{list(spec.shape)} as '
      f'its spec says; the environments returned {", ".join(found)}'
    )


def _columns(spec: types.Nest, num_environments: int) -> types.Nest:
  if isinstance(spec, dict):
    return {k: _columns(s, num_environments) for k, s in spec.items()}
  if isinstance(spec, tuple):
    return tuple(_columns(s, num_environments) for s in spec)
  return _Column(spec, num_environments)


def _write(columns: types.Nest, values: Sequence[Any]) -> types.Nest:
  """Writes K nests into the columns, leaf by leaf."""
  if isinstance(columns, _Column):
    return columns.write(values)
  if isinstance(columns, dict):
    return {k: _write(c, [v[k] for v in values]) for k, c in columns.items()}
  return tuple(_write(c, [v[i] for v in values]) for i, c in enumerate(columns))
