"""Gradients of a loss whose shares lie on the devices of a mesh.

The convention, the only one that was right on every JAX we support: inside
`shard_map`, each device computes its own share of the loss, which no other
device counts too, and differentiates that. Collectives on the way transpose to
collectives, so the gradient of a param that is split comes out summed over the
axes it is split on; what is missing are the axes it is not split on. A psum of
the loss before differentiating would multiply gradients by the device count.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tunix_reverb import types
from tunix_reverb.sharding import mesh as mesh_lib

# (params, rows of a batch) -> (this device's share of the loss, f32 [], nest of
# sums over the rows).
LossShare = Callable[[types.Nest, types.Nest], tuple[jax.Array, types.Nest]]


def accumulate(
  loss_share: LossShare,
  params: types.Nest,
  batch: types.Nest,
  param_specs: types.Nest,
  *,
  num_micro_batches: int = 1,
) -> tuple[types.Nest, types.Nest]:
  """Gradients of the global loss, and sums, over micro-batches in turn.

  Only one micro-batch's activations exist at a time. Inside `shard_map`.

  Args:
    loss_share: its loss must be normalised by something that is fixed for the
      whole global batch, such as its number of tokens: shares are summed.
    params: per-device shards.
    batch: nest of [b, ...], this device's rows.
    param_specs: nest of `PartitionSpec` like `params`, or one for all.
    num_micro_batches: divides b; consecutive rows go together.

  Returns:
    (gradients, f32 per-device shards like `params`, equal on devices along axes
    that the param is not split on; nest of this device's sums, not yet summed
    over the mesh).

  Raises:
    ValueError: num_micro_batches does not divide the rows of this device.
  """
  gradient = jax.grad(loss_share, has_aux=True)
  if num_micro_batches == 1:
    gradients, sums = gradient(params, batch)
    return mesh_lib.psum_over_mesh(gradients, param_specs), sums

  def body(
    total: types.Nest, micro_batch: types.Nest
  ) -> tuple[types.Nest, types.Nest]:
    gradients, sums = gradient(params, micro_batch)
    return jax.tree_util.tree_map(jnp.add, total, gradients), sums

  gradients, sums = jax.lax.scan(
    body,
    jax.tree_util.tree_map(jnp.zeros_like, params),
    split_rows(batch, num_micro_batches),
  )
  sums = jax.tree_util.tree_map(lambda x: jnp.sum(x, axis=0), sums)
  return mesh_lib.psum_over_mesh(gradients, param_specs), sums


def split_rows(
  batch: types.Nest, count: int, name: str = 'num_micro_batches'
) -> types.Nest:
  """[b, ...] -> [count, b / count, ...].

  Raises:
    ValueError: `count`, which the user knows as `name`, does not divide b.
  """

  def split(x: jax.Array) -> jax.Array:
    if x.shape[0] % count:
      raise ValueError(
        f'{name} ({count}) must divide the rows of one device ({x.shape[0]})'
      )
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])

  return jax.tree_util.tree_map(split, batch)
