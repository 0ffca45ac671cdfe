"""The device mesh: axis names, placement, and collectives over it.

The only module that knows where `shard_map` lives. Mesh axes, outermost first:
`data` and `fsdp` both split the rows of a batch, `sequence` splits positions,
`tensor` splits heads, MLP features and vocabulary. Params of a transformer are
split over `fsdp`, `sequence` and `tensor`, so that `data` alone repeats them.
Networks without positions hold their params whole; for them devices along
`sequence` and `tensor` repeat each other's work.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix_reverb import types

DATA = 'data'
FSDP = 'fsdp'
SEQUENCE = 'sequence'
TENSOR = 'tensor'
AXES = (DATA, FSDP, SEQUENCE, TENSOR)
# The axes that hold different rows of a batch.
BATCH_AXES = (DATA, FSDP)
# The axes that split a param which every device of them needs whole.
PARAM_AXES = (FSDP, SEQUENCE)
# The axes that hold different positions of a row, between blocks.
POSITION_AXES = (SEQUENCE, TENSOR)

PartitionSpec = jax.sharding.PartitionSpec


def make_mesh(
  devices: Sequence[jax.Device],
  *,
  data: int,
  fsdp: int = 1,
  sequence: int = 1,
  tensor: int = 1,
) -> jax.sharding.Mesh:
  """Arranges `devices` as [data, fsdp, sequence, tensor].

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  shape = (data, fsdp, sequence, tensor)
  if math.prod(shape) != len(devices) or min(shape) < 1:
    raise ValueError(
      f'mesh shape ({dict(zip(AXES, shape))}) must multiply to the number of '
      f'devices ({len(devices)})'
    )
  # Not `jax.make_mesh`: newer JAX gives it Explicit axes.
  return jax.sharding.Mesh(np.asarray(devices).reshape(shape), AXES)


def shard_map(
  fn: Callable[..., Any],
  *,
  mesh: jax.sharding.Mesh,
  in_specs: Any,
  out_specs: Any,
) -> Callable[..., Any]:
  """`jax.shard_map` of any JAX from 0.4.34 on, its replication check off.

  Off because under the check the transpose of a replicated input inserts a
  psum of its own: code that psums its gradients, as ours does, is then
  silently wrong by the number of devices.
  """
  if hasattr(jax, 'shard_map'):
    implementation = jax.shard_map
  else:
    # Here, because newer JAX warns of the import.
    from jax.experimental import shard_map as experimental

    implementation = experimental.shard_map
  parameters = inspect.signature(implementation).parameters
  check = 'check_vma' if 'check_vma' in parameters else 'check_rep'
  return implementation(
    fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **{check: False}
  )


def complete_client(client: Any) -> None:
  """Gives the client of JAX 0.4.34's coordinator what Orbax asks it for.

  Args:
    client: of the coordinator of several processes.
  """
  kind = type(client)
  if hasattr(kind, 'key_value_try_get'):
    return
  # Raises what the newer method does where there is no such key.
  kind.key_value_try_get = lambda self, key: self.blocking_key_value_get(key, 1)


def has_ordered_gloo() -> bool:
  """Whether gloo keeps apart what several CPU processes send at a time.

  That of JAX 0.4.34 does not: params that are gathered from other processes
  come mixed up, and it aborts or hangs. Sums over processes are few, and fine.
  """
  return hasattr(jax, 'shard_map')


def batch_spec() -> PartitionSpec:
  """Of every leaf [B, ...] of a batch: rows over (data, fsdp)."""
  return PartitionSpec(BATCH_AXES)


def token_spec() -> PartitionSpec:
  """Of a leaf [B, L] that goes into a transformer.

  Rows over (data, fsdp), positions over `sequence`; devices along `tensor` hold
  the same.
  """
  return PartitionSpec(BATCH_AXES, SEQUENCE)


def position_spec() -> PartitionSpec:
  """Of a leaf [B, L] that comes out of one: every position on one device."""
  return PartitionSpec(BATCH_AXES, POSITION_AXES)


def replicated_spec() -> PartitionSpec:
  """Of every leaf that each device holds whole."""
  return PartitionSpec()


def num_batch_shards(mesh: jax.sharding.Mesh) -> int:
  """The B of a global batch must be a multiple of this."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def place_batch(
  batch: types.Batch,
  mesh: jax.sharding.Mesh,
  spec: PartitionSpec | None = None,
) -> types.Batch:
  """Puts a host batch on the mesh; every leaf is [B, ...], B global.

  JAX may keep using the memory of the host arrays: do not write to them
  afterwards.

  Args:
    batch: on the host.
    mesh: where it goes.
    spec: of every leaf; `batch_spec` if None. With `token_spec` every leaf is
      [B, L, ...].

  Raises:
    ValueError: B does not divide evenly over the devices.
  """
  rows, shards = batch.segment_ids.shape[0], num_batch_shards(mesh)
  if rows % shards:
    raise ValueError(
      f'rows of the batch ({rows}) must be a multiple of the devices along '
      f'{" x ".join(BATCH_AXES)} ({shards}); pad it with rows of '
      'segment_ids 0'
    )
  if mesh.size == 1 and mesh.devices.item().platform == 'cpu':
    return batch  # It is in the device's memory already.
  return jax.device_put(
    batch, jax.sharding.NamedSharding(mesh, spec or batch_spec())
  )


def replicate(tree: types.Nest, mesh: jax.sharding.Mesh) -> types.Nest:
  """Puts every leaf whole on every device of the mesh."""
  return jax.device_put(
    tree, jax.sharding.NamedSharding(mesh, replicated_spec())
  )


def num_devices_along(axes: str | Sequence[str]) -> int:
  """Inside `shard_map`; known when tracing."""
  axes = (axes,) if isinstance(axes, str) else axes
  return math.prod(jax.lax.psum(1, axis) for axis in axes)


def all_gather(
  x: jax.Array, axes: str | tuple[str, ...], *, dim: int
) -> jax.Array:
  """Puts parts together along `dim`; inside `shard_map`.

  Compilers keep collectives of a single device, and copy for them.
  """
  if num_devices_along(axes) == 1:
    return x
  return jax.lax.all_gather(x, axes, axis=dim, tiled=True)


def psum_scalars(tree: types.Nest) -> types.Nest:
  """Sums f32 scalars over the whole mesh in one go; inside `shard_map`."""
  leaves, treedef = jax.tree_util.tree_flatten(tree)
  sums = jax.lax.psum(jnp.stack(leaves), AXES)
  return jax.tree_util.tree_unflatten(treedef, list(sums))


def psum_over_mesh(tree: types.Nest, param_specs: types.Nest) -> types.Nest:
  """Sums per-device gradients over every axis their param is not split on.

  Call inside `shard_map`. Each device's gradient must be that of its own share
  of the loss, of which every device holds a different one: differentiating a
  psum'd loss multiplies it by the number of devices.

  Args:
    tree: gradients, per-device shapes.
    param_specs: nest of `PartitionSpec`, or one for the whole tree.
  """

  def psum(spec: PartitionSpec, x: jax.Array) -> jax.Array:
    held = axes_of(spec)
    missing = tuple(axis for axis in AXES if axis not in held)
    return jax.lax.psum(x, missing) if missing else x

  return jax.tree_util.tree_map(
    psum,
    expand_specs(param_specs, tree),
    tree,
    is_leaf=_is_spec,
  )


def global_norm(tree: types.Nest, param_specs: types.Nest) -> jax.Array:
  """The norm over all leaves of global arrays, f32 []; inside `shard_map`.

  `optax.global_norm` would see this device's shards only.

  Args:
    tree: per-device shards of params or gradients.
    param_specs: nest of `PartitionSpec`, or one for the whole tree.
  """
  # Summed up on the device first: one psum for each way of being split.
  squares: dict[tuple[str, ...], jax.Array] = {}
  specs = jax.tree_util.tree_leaves(
    expand_specs(param_specs, tree), is_leaf=_is_spec
  )
  for spec, x in zip(specs, jax.tree_util.tree_leaves(tree)):
    axes = tuple(axes_of(spec))
    square = jnp.sum(jnp.square(x.astype(jnp.float32)))
    squares[axes] = squares[axes] + square if axes in squares else square
  return jnp.sqrt(
    sum(jax.lax.psum(x, axes) if axes else x for axes, x in squares.items())
  )


def expand_specs(specs: types.Nest, tree: types.Nest) -> types.Nest:
  """A nest like `tree` of `PartitionSpec`.

  Args:
    specs: nest of `PartitionSpec` of which each stands for all leaves of a part
      of `tree`; one for the whole tree, for example.
    tree: any leaves.
  """
  return jax.tree_util.tree_map(
    lambda spec, part: jax.tree_util.tree_map(lambda _: spec, part),
    specs,
    tree,
    is_leaf=_is_spec,
  )


def axes_of(spec: PartitionSpec) -> list[str]:
  """The mesh axes that a spec names, in its order."""
  axes: list[str] = []
  for entry in spec:
    if entry is not None:
      axes.extend(entry if isinstance(entry, tuple) else (entry,))
  return axes


def _is_spec(x: object) -> bool:
  return isinstance(x, PartitionSpec)
