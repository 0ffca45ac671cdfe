"""Heads: features [..., D] in, distribution params and values out."""

from __future__ import annotations

import math
from typing import Any

from dm_env import specs
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tunix_reverb.ops import distributions

# A nearly uniform first policy: no action is favoured before any is learnt.
_POLICY_INIT_SCALE = 0.01
# Standard deviation of the first policy, in half ranges of the action.
_INITIAL_STD = 0.5
_LOG_STD_MIN, _LOG_STD_MAX = -5.0, 2.0


class LogitsHead(nn.Module):
  """Logits of a categorical or multi-categorical distribution."""

  num_logits: int

  @nn.compact
  def __call__(self, features: jax.Array) -> jax.Array:
    return _policy_layer(self.num_logits, 'logits')(features)


class GaussianHead(nn.Module):
  """Mean from the features, log_std a free parameter, as in PPO.

  Both are in units of the action: mean = centre + half_range * output.
  """

  shape: tuple[int, ...]
  centre: tuple[float, ...]
  half_range: tuple[float, ...]

  @nn.compact
  def __call__(self, features: jax.Array) -> distributions.GaussianParams:
    size = math.prod(self.shape)
    mean = _policy_layer(size, 'mean')(features)
    log_std = self.param(
      'log_std', nn.initializers.constant(math.log(_INITIAL_STD)), (size,)
    )
    # Without the clip a confident policy's density, and with it the ratios,
    # grow without bound.
    log_std = jnp.clip(log_std, _LOG_STD_MIN, _LOG_STD_MAX)
    per_dim = lambda x: jnp.broadcast_to(jnp.asarray(x), mean.shape)
    centre = np.asarray(self.centre, np.float32)
    half_range = np.asarray(self.half_range, np.float32)
    mean = per_dim(centre) + per_dim(half_range) * mean
    log_std = per_dim(log_std + np.log(half_range))
    batch_shape = features.shape[:-1]
    return distributions.GaussianParams(
      mean.reshape(*batch_shape, *self.shape),
      log_std.reshape(*batch_shape, *self.shape),
    )


class ValueHead(nn.Module):
  """Value estimates, [..., D] -> [...]."""

  @nn.compact
  def __call__(self, features: jax.Array) -> jax.Array:
    return nn.Dense(1, name='value')(features)[..., 0]


def make_policy_head(
  action_spec: Any,
) -> tuple[nn.Module, distributions.Distribution]:
  """The head and the distribution for an action spec.

  Bounded integers: categorical (rank 0) or multi-categorical (rank 1). Floats:
  a diagonal Gaussian, scaled to the bounds where they are finite.

  Raises:
    ValueError: any other action spec.
  """
  if not isinstance(action_spec, specs.Array):
    raise ValueError(
      f'action_spec ({action_spec!r}) must be a single dm_env array spec; '
      'flatten nested actions in the environment'
    )
  if np.issubdtype(action_spec.dtype, np.floating):
    return _gaussian(action_spec)
  if (
    not np.issubdtype(action_spec.dtype, np.integer)
    or not isinstance(action_spec, specs.BoundedArray)
    or len(action_spec.shape) > 1
  ):
    raise ValueError(
      f'action_spec ({action_spec!r}) must be bounded integers of rank 0 or '
      '1, or floats'
    )
  low = np.broadcast_to(action_spec.minimum, action_spec.shape)
  high = np.broadcast_to(action_spec.maximum, action_spec.shape)
  num_values = high.astype(np.int64) - low + 1
  distribution: distributions.Distribution
  if action_spec.shape:
    distribution = distributions.MultiCategorical(
      tuple(num_values.tolist()), tuple(low.tolist())
    )
  else:
    distribution = distributions.Categorical(int(num_values), int(low))
  return LogitsHead(int(np.sum(num_values))), distribution


def _gaussian(
  action_spec: specs.Array,
) -> tuple[nn.Module, distributions.Distribution]:
  shape = tuple(action_spec.shape)
  low = np.broadcast_to(getattr(action_spec, 'minimum', -np.inf), shape)
  high = np.broadcast_to(getattr(action_spec, 'maximum', np.inf), shape)
  low, high = low.astype(np.float64).ravel(), high.astype(np.float64).ravel()
  bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
  low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
  centre, half_range = (low + high) / 2, (high - low) / 2
  head = GaussianHead(shape, tuple(centre.tolist()), tuple(half_range.tolist()))
  return head, distributions.DiagonalGaussian(shape)


def _policy_layer(size: int, name: str) -> nn.Dense:
  return nn.Dense(
    size,
    kernel_init=nn.initializers.variance_scaling(
      _POLICY_INIT_SCALE**2, 'fan_in', 'truncated_normal'
    ),
    name=name,
  )
