"""Attention on TPU: the Pallas splash kernel that JAX carries.

The kernel takes one row at a time and knows of whole rows; under context
parallelism this device's part of the causal mask is cut out of the kernel's
own tables, which it lays out for exactly that.

Letters as in `blocked_attention.py`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as kernel_lib,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as mask_lib,
)
import jax.numpy as jnp

from tunix_reverb.networks.transformer import blocked_attention
from tunix_reverb.sharding import mesh as mesh_lib

# The width of a vector register; lengths must be multiples, heads are padded.
_LANES = 128


def objection(queries: jax.Array) -> str:
  """What the kernel needs that these queries [B, Q, H, d] have not, or ''."""
  length = queries.shape[1]
  if length % _LANES:
    return f'positions per device ({length}) in multiples of {_LANES}'
  return ''


def splash_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
  *,
  mesh: jax.sharding.Mesh,
  block: int,
) -> jax.Array:
  """See `attention.reference_attention`; inside `shard_map` over `mesh`.

  Off TPU the kernel is interpreted, slowly, for tests.

  Args:
    queries: [B, Q, H, d], Q = S / mesh.shape['sequence'].
    keys: [B, S, K, d].
    values: [B, S, K, d].
    q_segment_ids: i32 [B, Q], 0 is padding.
    kv_segment_ids: i32 [B, S].
    mesh: the device's index along `sequence` says which queries it has.
    block: positions of a block, rounded to what divides Q.

  Returns:
    [B, Q, H, d], 0 on padding.
  """
  length, heads, size = queries.shape[1:]
  block = _divisor(length, block)
  kernel = _kernel(
    heads,
    length,
    keys.shape[1],
    block=block,
    mesh=mesh,
    interpret=mesh.devices.flat[0].platform != 'tpu',
  )
  scale = jnp.asarray(1 / math.sqrt(size), queries.dtype)
  outputs = jax.vmap(kernel)(
    _heads_first(queries * scale),
    _heads_first(keys),
    _heads_first(values),
    kernel_lib.SegmentIds(q_segment_ids, kv_segment_ids),
  )
  # To the kernel padding is a segment like any other.
  is_padding = (q_segment_ids == 0)[:, :, None, None]
  outputs = jnp.moveaxis(outputs, 1, 2)[..., :size]
  return jnp.where(is_padding, jnp.zeros_like(outputs), outputs)


def _heads_first(x: jax.Array) -> jax.Array:
  """[B, L, H, d] -> [B, H, L, d + zeros to whole registers]."""
  pad = -x.shape[-1] % _LANES
  return jnp.pad(jnp.moveaxis(x, 2, 1), ((0, 0), (0, 0), (0, 0), (0, pad)))


def _divisor(length: int, most: int) -> int:
  """The largest multiple of `_LANES` up to `most` that divides `length`."""
  block = max(_LANES, min(most, length) // _LANES * _LANES)
  while length % block:
    block -= _LANES
  return block


def _kernel(
  heads: int,
  length: int,
  kv_length: int,
  *,
  block: int,
  mesh: jax.sharding.Mesh,
  interpret: bool,
) -> Any:
  """This device's kernel."""
  shards = mesh.shape[mesh_lib.SEQUENCE]
  assert length * shards == kv_length
  mask = mask_lib.CausalMask((kv_length, kv_length), shard_count=shards)
  kernel = kernel_lib.make_splash_mha(
    mask_lib.MultiHeadMask([mask] * heads),
    block_sizes=kernel_lib.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_kv_dkv_compute=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    head_shards=1,
    q_seq_shards=shards,
    residual_checkpoint_name=blocked_attention.RESIDUAL,
    interpret=interpret,
  )
  if shards == 1:
    return kernel
  sharding = jax.sharding.NamedSharding(
    mesh, mesh_lib.PartitionSpec(None, mesh_lib.SEQUENCE)
  )
  return jax.tree_util.tree_map(
    lambda spec, table: _own(table, spec, shards),
    kernel.manual_sharding_spec(sharding),
    kernel,
    is_leaf=lambda x: isinstance(x, mesh_lib.PartitionSpec),
  )


def _own(
  table: jax.Array, spec: jax.sharding.PartitionSpec, shards: int
) -> jax.Array:
  """This device's part of a table, [.../ shards, ...] where it is split."""
  for dim, axis in enumerate(spec):
    if axis == mesh_lib.SEQUENCE:
      size = table.shape[dim] // shards
      start = jax.lax.axis_index(axis) * jnp.int32(size)
      table = jax.lax.dynamic_slice_in_dim(table, start, size, dim)
  return table
