"""One form for every environment, so that networks and adders see one kind.

The canonical form of a `dm_env.Environment`:
  * Observations are nests of plain dicts and tuples; leaves are arrays, named,
    float64 narrowed to float32 and int64 to int32 (JAX's own widths).
  * An action is one array. Integers count from 0: a scalar is a
    `DiscreteArray`, several are a `BoundedArray` int32 [D]. Floats are f32 [D]
    in [-1, 1] where the environment's own dimension is bounded; actions are
    scaled to its bounds and clipped to them. A dimension with an infinite
    bound passes through (clipped to the finite one, if any). The padded tokens
    of a turn stay as they are (see `turns`).
  * Reward and discount are float32 scalars.

Vector environments step through `step_raw(action)`, which canonical
environments and adapters offer beside `step`: it returns the four fields of a
`TimeStep` in order, as any tuple, for a running episode only (no automatic
reset). Its observation may be uncast and may be overwritten by the next call;
a scalar integer action comes as a Python int. `step` is the same with the
casts, so there is one implementation of each environment.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import dm_env
from dm_env import specs
import numpy as np

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.environments import turns

# A bounded range wider than this is a library's way to write "unbounded".
_LARGEST_RANGE = 1e30


def canonical_dtype(dtype: Any) -> np.dtype:
  """float64 becomes float32, int64 and wider integers int32."""
  dtype = np.dtype(dtype)
  if dtype == np.float64:
    return np.dtype(np.float32)
  if (dtype.kind in 'iu' and dtype.itemsize > 4) or dtype == np.uint32:
    return np.dtype(np.int32)
  return dtype


def canonical_spec(spec: types.Nest, path: str = 'observation') -> types.Nest:
  """The canonical form of an observation spec.

  Raises:
    errors.UserError: a leaf is no numeric array.
  """
  if isinstance(spec, Mapping):
    return {k: canonical_spec(v, f'{path}/{k}') for k, v in spec.items()}
  if isinstance(spec, (tuple, list)):
    return tuple(canonical_spec(v, f'{path}/{i}') for i, v in enumerate(spec))
  if not isinstance(spec, specs.Array) or spec.dtype.kind not in 'biuf':
    raise errors.UserError(
      f'{path} ({spec!r}) must be a spec of numbers; leave it out of the '
      'observation or encode it as an array'
    )
  dtype = canonical_dtype(spec.dtype)
  name = spec.name or path
  if isinstance(spec, specs.DiscreteArray):
    return specs.DiscreteArray(spec.num_values, dtype=dtype, name=name)
  if isinstance(spec, specs.BoundedArray):
    return specs.BoundedArray(
      spec.shape,
      dtype,
      cast_bound(spec.minimum, dtype),
      cast_bound(spec.maximum, dtype),
      name=name,
    )
  return specs.Array(spec.shape, dtype, name=name)


def cast_bound(bound: Any, dtype: np.dtype) -> np.ndarray:
  """`bound` in `dtype`; what does not fit becomes the nearest that does."""
  bound = np.asarray(bound)
  if dtype.kind in 'iu':
    info = np.iinfo(dtype)
    return np.clip(bound, info.min, info.max).astype(dtype)
  with np.errstate(over='ignore'):  # Beyond float32 means infinite.
    return bound.astype(dtype)


def cast(spec: types.Nest, value: types.Nest) -> types.Nest:
  """`value` in the structure and dtypes of the canonical `spec`."""
  if isinstance(spec, dict):
    return {k: cast(s, value[k]) for k, s in spec.items()}
  if isinstance(spec, tuple):
    return tuple(cast(s, value[i]) for i, s in enumerate(spec))
  return np.asarray(value, dtype=spec.dtype)


class ActionMap:
  """From canonical actions to the environment's own.

  Attributes:
    spec: the canonical action spec.
    is_identity: whether the environment's own spec is canonical already.
  """

  def __init__(self, own: Any):
    """Args: own: the environment's action spec.

    Raises:
      errors.UserError: the spec is a nest, or unbounded integers.
    """
    if not isinstance(own, specs.Array) or own.dtype.kind not in 'biuf':
      raise errors.UserError(
        f'action_spec ({own!r}) must be one array of numbers; wrap the '
        'environment so that it takes one'
      )
    self._shape = own.shape
    self._dtype = own.dtype
    if own.dtype.kind == 'f':
      self._init_floats(own)
    else:
      self._init_integers(own)
    self.is_identity = (
      type(self.spec) is type(own)
      and self.spec == own
      and (own.dtype.kind != 'f' or bool(np.all(self._scale == 1.0)))
    )

  def _init_integers(self, own: specs.Array) -> None:
    """Sets spec and offset for integers and booleans."""
    if not isinstance(own, specs.BoundedArray):
      raise errors.UserError(
        f'action_spec ({own!r}) must bound its integers: use a '
        'DiscreteArray or a BoundedArray'
      )
    if turns.is_turn(own):
      self._minimum, self.spec = np.zeros(own.shape, np.int64), own
      return
    self._minimum = np.broadcast_to(own.minimum, own.shape).astype(np.int64)
    maximum = np.broadcast_to(own.maximum, own.shape).astype(np.int64)
    largest = maximum - self._minimum
    if own.shape == ():
      self.spec = specs.DiscreteArray(
        int(largest) + 1, dtype=np.int32, name='action'
      )
    else:
      self.spec = specs.BoundedArray(
        (largest.size,), np.int32, 0, largest.ravel(), name='action'
      )

  def _init_floats(self, own: specs.Array) -> None:
    """Sets spec, scale and offset for floats."""
    low = np.ravel(np.broadcast_to(getattr(own, 'minimum', -np.inf), own.shape))
    high = np.ravel(np.broadcast_to(getattr(own, 'maximum', np.inf), own.shape))
    self._minimum, self._maximum = low, high
    low, high = low.astype(np.float64), high.astype(np.float64)
    with np.errstate(over='ignore'):
      bounded = high - low < _LARGEST_RANGE
    # Where unbounded: scale 1, offset 0.
    low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    self._scale, self._offset = (high - low) / 2, (high + low) / 2
    limit = np.where(bounded, 1.0, np.inf)
    self.spec = specs.BoundedArray(
      limit.shape, np.float32, -limit, limit, name='action'
    )

  def __call__(self, action: Any) -> Any:
    """Maps canonical actions [...] or [..., D] to the environment's own."""
    action = np.asarray(action)
    if self._dtype.kind == 'f':
      action = action * self._scale + self._offset
      # One clip after scaling covers both: scaling is monotone, and rounding
      # may leave the bounds by an ulp.
      action = np.minimum(np.maximum(action, self._minimum), self._maximum)
    leading = action.shape[: action.ndim - len(self.spec.shape)]
    action = action.reshape(leading + self._shape)
    if self._dtype.kind != 'f':
      action = action + self._minimum
    # [()] turns a 0-d array into a scalar; others are left alone.
    return np.asarray(action).astype(self._dtype)[()]


class CanonicalEnvironment(dm_env.Environment):
  """`environment` in canonical form; see the module's docstring."""

  step_raw: Callable[[Any], tuple]

  def __init__(self, environment: dm_env.Environment):
    """Raises errors.UserError where a spec has no canonical form."""
    self._environment = environment
    self._action_map = ActionMap(environment.action_spec())
    self._observation_spec = canonical_spec(environment.observation_spec())
    for name, spec in (
      ('reward_spec', environment.reward_spec()),
      ('discount_spec', environment.discount_spec()),
    ):
      if getattr(spec, 'shape', None) != ():
        raise errors.UserError(f'{name} ({spec!r}) must be one scalar')
    self.step_raw = self._make_step_raw()

  def _make_step_raw(self) -> Callable[[Any], tuple]:
    """The cheapest call that steps the environment."""
    environment, action_map = self._environment, self._action_map
    raw = getattr(environment, 'step_raw', None)
    step = raw or environment.step
    own = environment.action_spec()
    discrete = isinstance(own, specs.DiscreteArray)
    if raw is not None and (discrete or action_map.is_identity):
      return raw
    if discrete:
      # Strict environments validate the action's dtype.
      to_own = own.dtype.type
      return lambda action: step(to_own(action))
    return lambda action: step(action_map(action))

  def reset(self) -> dm_env.TimeStep:
    return self._canonical(self._environment.reset())

  def step(self, action: Any) -> dm_env.TimeStep:
    return self._canonical(self._environment.step(self._action_map(action)))

  def _canonical(self, timestep: dm_env.TimeStep) -> dm_env.TimeStep:
    observation = cast(self._observation_spec, timestep.observation)
    if timestep.step_type == dm_env.StepType.FIRST:
      return dm_env.restart(observation)
    return dm_env.TimeStep(
      timestep.step_type,
      np.float32(timestep.reward),
      np.float32(timestep.discount),
      observation,
    )

  def observation_spec(self) -> types.Nest:
    return self._observation_spec

  def action_spec(self) -> specs.Array:
    return self._action_map.spec

  def reward_spec(self) -> specs.Array:
    return specs.Array((), np.float32, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, 0.0, 1.0, name='discount')

  def close(self) -> None:
    self._environment.close()


def canonicalise(environment: dm_env.Environment) -> dm_env.Environment:
  """`environment` itself if it is canonical with `step_raw`, else wrapped."""
  if isinstance(environment, CanonicalEnvironment):
    return environment
  observation_spec = environment.observation_spec()
  if (
    hasattr(environment, 'step_raw')
    # A nest may hide an OrderedDict, which equals the plain dict.
    and isinstance(observation_spec, specs.Array)
    and observation_spec == canonical_spec(observation_spec)
    and ActionMap(environment.action_spec()).is_identity
    and environment.reward_spec().dtype == np.float32
    and environment.discount_spec().dtype == np.float32
  ):
    return environment
  return CanonicalEnvironment(environment)
