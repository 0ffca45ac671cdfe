"""Params in shards: created in place, gathered where they are used.

Every device of the mesh keeps one shard of each param and of its optimiser
state. `gather`, inside `shard_map`, puts a param together over the axes of
`mesh.PARAM_AXES` for as long as it is used; its transpose, which autodiff
derives, is the reduce-scatter of the gradient back into shards.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.typing import DTypeLike

from tunix_reverb import types
from tunix_reverb.sharding import mesh as mesh_lib


def shardings(mesh: jax.sharding.Mesh, specs: types.Nest) -> types.Nest:
  """Nest of `NamedSharding` for a nest of `PartitionSpec`."""
  return jax.tree_util.tree_map(
    lambda spec: jax.sharding.NamedSharding(mesh, spec),
    specs,
    is_leaf=lambda x: isinstance(x, mesh_lib.PartitionSpec),
  )


def create(
  init: Callable[[jax.Array], types.Nest],
  mesh: jax.sharding.Mesh,
  specs: types.Nest,
  *,
  key: jax.Array,
) -> types.Nest:
  """init(key) as global arrays of which no device ever holds more than shards.

  Values do not depend on the mesh where `jax_threefry_partitionable` is set;
  without it each device also draws the numbers of the others.

  Args:
    init: pure, PRNG key -> nest of params.
    mesh: where they go.
    specs: nest of `PartitionSpec` like the params.
    key: PRNG key.
  """
  return jax.jit(init, out_shardings=shardings(mesh, specs))(key)


def gather(
  shard: jax.Array, spec: mesh_lib.PartitionSpec, dtype: DTypeLike
) -> jax.Array:
  """Puts a param together over `PARAM_AXES`; inside `shard_map`.

  The cast comes first: half the bytes travel, and gradients are reduced in
  `dtype` too.

  Args:
    shard: this device's part, any float dtype.
    spec: how the param is split; what is split over `tensor` stays split.
    dtype: of the result.
  """
  whole = shard.astype(dtype)
  for dim, entry in enumerate(spec):
    axes = entry if isinstance(entry, tuple) else (entry,)
    over = tuple(axis for axis in axes if axis in mesh_lib.PARAM_AXES)
    if over:
      assert over == axes, f'{spec} mixes {over} with other axes in one dim'
      whole = mesh_lib.all_gather(whole, over, dim=dim)
  return whole
