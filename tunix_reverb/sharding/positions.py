"""Who holds which positions of a row, and moving between the layouts.

Inside `shard_map` over a mesh with s devices along `sequence` and t along
`tensor`, a leaf [B, L, ...] of global shape has one of three layouts. b is
B / (data * fsdp), the rows of this device.

- `row`: [b, L, ...], whole rows. Devices along both axes hold the same.
- `shard`: [b, L / s, ...], split over `sequence`. Devices along `tensor` hold
  the same. This is how tokens come in (`mesh.token_spec`).
- `own`: [b, L / (s * t), ...], split over both; every position is on one device
  (`mesh.position_spec`). Activations between blocks, log-probs and values have
  it, and a loss summed over it is this device's share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tunix_reverb.sharding import mesh as mesh_lib

_DIM = 1


def shard_from_own(x: jax.Array) -> jax.Array:
  """[b, L / (s * t), ...] -> [b, L / s, ...]; transposes to a sum over t."""
  return mesh_lib.all_gather(x, mesh_lib.TENSOR, dim=_DIM)


def row_from_shard(x: jax.Array) -> jax.Array:
  """[b, L / s, ...] -> [b, L, ...]; transposes to a sum over s."""
  return mesh_lib.all_gather(x, mesh_lib.SEQUENCE, dim=_DIM)


def row_from_own(x: jax.Array) -> jax.Array:
  """[b, L / (s * t), ...] -> [b, L, ...]; transposes to a sum over s and t."""
  return mesh_lib.all_gather(x, mesh_lib.POSITION_AXES, dim=_DIM)


def own_from_partial_sums(x: jax.Array) -> jax.Array:
  """Sums over t partial results [b, L / s, ...] -> [b, L / (s * t), ...]."""
  if mesh_lib.num_devices_along(mesh_lib.TENSOR) == 1:
    return x
  return jax.lax.psum_scatter(
    x, mesh_lib.TENSOR, scatter_dimension=_DIM, tiled=True
  )


def own_from_shard(x: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
  """[b, L / s, ...] -> this device's [b, L / (s * t), ...] of it."""
  return _part(x, mesh_lib.TENSOR, mesh)


def own_from_row(x: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
  """[b, L, ...] -> this device's [b, L / (s * t), ...] of it."""
  return _part(_part(x, mesh_lib.SEQUENCE, mesh), mesh_lib.TENSOR, mesh)


def shard_start(shard_length: int, mesh: jax.sharding.Mesh) -> jax.Array | int:
  """The position in its row of the first one of this device's shard."""
  if mesh.shape[mesh_lib.SEQUENCE] == 1:
    return 0  # Known when compiling, which saves masks.
  return jax.lax.axis_index(mesh_lib.SEQUENCE) * jnp.int32(shard_length)


def _part(x: jax.Array, axis: str, mesh: jax.sharding.Mesh) -> jax.Array:
  size = mesh.shape[axis]
  if size == 1:
    return x
  length = x.shape[_DIM] // size
  start = jax.lax.axis_index(axis) * jnp.int32(length)
  return jax.lax.dynamic_slice_in_dim(x, start, length, _DIM)
