"""Action distributions over batches of parameters.

Every class is a set of pure functions: `sample(params, key=)`, `mode(params)`,
`log_prob(params, action)` and `entropy(params)`. `params` carry any leading
dims `...`; the batch dims of results are the same. All maths is float32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Categorical:
  """One integer action in minimum..minimum + num_values - 1.

  Params: logits [..., num_values]. Actions: integer [...].
  """

  num_values: int
  minimum: int = 0

  def sample(self, params: jax.Array, *, key: jax.Array) -> jax.Array:
    """i32 [...]."""
    index = jax.random.categorical(key, params.astype(jnp.float32))
    return index.astype(jnp.int32) + self.minimum

  def mode(self, params: jax.Array) -> jax.Array:
    """i32 [...], the most likely action."""
    return jnp.argmax(params, axis=-1).astype(jnp.int32) + self.minimum

  def log_prob(self, params: jax.Array, action: jax.Array) -> jax.Array:
    """f32 [...]; 0 for an action that is out of range, as on padding."""
    # A comparison, not a gather: its gradient is one fused kernel instead of
    # a scatter, and an index out of range is harmless.
    index = action.astype(jnp.int32)[..., None] - self.minimum
    chosen = index == jax.lax.broadcasted_iota(
      jnp.int32, params.shape, params.ndim - 1
    )
    log_probs = jax.nn.log_softmax(params.astype(jnp.float32))
    return jnp.sum(jnp.where(chosen, log_probs, 0.0), axis=-1)

  def entropy(self, params: jax.Array) -> jax.Array:
    """f32 [...], nats."""
    log_probs = jax.nn.log_softmax(params.astype(jnp.float32))
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


@dataclasses.dataclass(frozen=True)
class MultiCategorical:
  """K independent integers, the k-th one of num_values[k] from minimum[k].

  Params: logits [..., sum(num_values)], one part after the other. Actions:
  integer [..., K].
  """

  num_values: tuple[int, ...]
  minimum: tuple[int, ...]

  def sample(self, params: jax.Array, *, key: jax.Array) -> jax.Array:
    """i32 [..., K]."""
    keys = jax.random.split(key, len(self.num_values))
    return jnp.stack(
      [
        part.sample(logits, key=keys[k])
        for k, (part, logits) in enumerate(self._parts(params))
      ],
      axis=-1,
    )

  def mode(self, params: jax.Array) -> jax.Array:
    """i32 [..., K], the most likely action."""
    return jnp.stack(
      [part.mode(logits) for part, logits in self._parts(params)], axis=-1
    )

  def log_prob(self, params: jax.Array, action: jax.Array) -> jax.Array:
    """f32 [...], summed over the K parts."""
    parts = [
      part.log_prob(logits, action[..., k])
      for k, (part, logits) in enumerate(self._parts(params))
    ]
    return jnp.sum(jnp.stack(parts), axis=0)

  def entropy(self, params: jax.Array) -> jax.Array:
    """f32 [...], nats, summed over the K parts."""
    parts = [part.entropy(logits) for part, logits in self._parts(params)]
    return jnp.sum(jnp.stack(parts), axis=0)

  def _parts(self, params: jax.Array) -> list[tuple[Categorical, jax.Array]]:
    splits = np.cumsum(self.num_values)[:-1].tolist()
    return [
      (Categorical(num_values, minimum), logits)
      for num_values, minimum, logits in zip(
        self.num_values, self.minimum, jnp.split(params, splits, axis=-1)
      )
    ]


class GaussianParams(NamedTuple):
  """mean and log_std, both [..., *shape]."""

  mean: jax.Array
  log_std: jax.Array


@dataclasses.dataclass(frozen=True)
class DiagonalGaussian:
  """Independent Gaussians; the environment's wrapper clips what it cannot do.

  Unsquashed: log_prob is that of the action before any clipping, so behaviour
  and target probabilities are of the same event.

  Params: `GaussianParams`. Actions: float [..., *shape].
  """

  shape: tuple[int, ...]

  def sample(self, params: GaussianParams, *, key: jax.Array) -> jax.Array:
    """f32 [..., *shape]."""
    mean, log_std = self._cast(params)
    noise = jax.random.normal(key, mean.shape, jnp.float32)
    return mean + jnp.exp(log_std) * noise

  def mode(self, params: GaussianParams) -> jax.Array:
    """f32 [..., *shape], the mean."""
    return params.mean.astype(jnp.float32)

  def log_prob(self, params: GaussianParams, action: jax.Array) -> jax.Array:
    """f32 [...], of the joint density."""
    mean, log_std = self._cast(params)
    normalised = (action.astype(jnp.float32) - mean) * jnp.exp(-log_std)
    return self._sum(
      -0.5 * jnp.square(normalised) - log_std - 0.5 * math.log(2 * math.pi)
    )

  def entropy(self, params: GaussianParams) -> jax.Array:
    """f32 [...], nats."""
    _, log_std = self._cast(params)
    return self._sum(log_std + 0.5 * math.log(2 * math.pi * math.e))

  def _cast(self, params: GaussianParams) -> GaussianParams:
    return GaussianParams(*(x.astype(jnp.float32) for x in params))

  def _sum(self, x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=tuple(range(x.ndim - len(self.shape), x.ndim)))


Distribution = Categorical | MultiCategorical | DiagonalGaussian
# An array of logits or `GaussianParams`, whatever the distribution takes.
DistributionParams = Any
