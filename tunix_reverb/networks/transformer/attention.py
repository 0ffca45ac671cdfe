"""Causal attention within segments: one function, several implementations.

`Attention` is that function. Each implementation is tested against
`reference_attention`, which says what it computes:

- `splash`: TPU, the Pallas kernel that JAX carries.
- `cudnn`: NVIDIA GPUs, cuDNN's kernel; bfloat16 only.
- `blocked`: plain JAX on any backend.
- `reference`: plain JAX, all scores at once; for tests and short rows.

Reading through a key and value cache (see `decoding`) is `reference_attention`
of a few queries per row, which `q_start` says the positions of.

Letters: B rows, Q and S positions of queries and keys, H query heads, K key
and value heads, d head size.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from tunix_reverb.networks.transformer import blocked_attention
from tunix_reverb.networks.transformer import cudnn_attention
from tunix_reverb.sharding import positions


@dataclasses.dataclass(frozen=True)
class Attention:
  """Attention of this device's queries; call it inside `shard_map`.

  Rows are laid out in order: the positions of a segment follow each other, and
  the devices along `sequence` hold consecutive parts of a row.

  Attributes:
    mesh: the mesh of the `shard_map`.
    kind: one of `config.ATTENTION_KINDS`; 'auto' decides by platform, dtype and
      shapes of each call.
    block: positions of a block.
  """

  mesh: jax.sharding.Mesh
  kind: str
  block: int

  def __call__(
    self,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    q_segment_ids: jax.Array,
    kv_segment_ids: jax.Array,
  ) -> jax.Array:
    """See `reference_attention`.

    Args:
      queries: [B, Q, H, d], this device's positions and heads.
      keys: [B, S, K, d], all positions of the row.
      values: [B, S, K, d].
      q_segment_ids: i32 [B, Q], 0 is padding.
      kv_segment_ids: i32 [B, S].

    Returns:
      [B, Q, H, d], 0 on padding.

    Raises:
      ValueError: the implementation asked for cannot serve these arrays.
    """
    chex.assert_rank([queries, keys, values], 4)
    chex.assert_rank([q_segment_ids, kv_segment_ids], 2)
    chex.assert_equal_shape([keys, values])
    arrays = (queries, keys, values, q_segment_ids, kv_segment_ids)
    kind = self._resolve(queries)
    if kind == 'splash':
      return _splash().splash_attention(
        *arrays, mesh=self.mesh, block=self.block
      )
    q_start = positions.shard_start(queries.shape[1], self.mesh)
    if kind == 'cudnn':
      return cudnn_attention.cudnn_attention(
        *arrays, q_start=q_start, block=max(self.block, 1024)
      )
    if kind == 'blocked':
      return blocked_attention.blocked_attention(
        *arrays, q_start=q_start, block=self.block
      )
    return reference_attention(*arrays, q_start=q_start)

  def _resolve(self, queries: jax.Array) -> str:
    platform = self.mesh.devices.flat[0].platform
    if self.kind == 'auto':
      if platform == 'tpu' and not _splash().objection(queries):
        return 'splash'
      if platform == 'gpu' and not cudnn_attention.objection(queries):
        return 'cudnn'
      return 'blocked'
    objection = ''
    if self.kind == 'splash':
      objection = _splash().objection(queries)
    elif self.kind == 'cudnn':
      objection = cudnn_attention.objection(queries)
    if objection:
      raise ValueError(f'attention ({self.kind!r}) needs {objection}')
    return self.kind


def reference_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
  *,
  q_start: jax.Array | int = 0,
) -> jax.Array:
  """Softmax attention, causal and within segments, all scores at once.

    o_i = sum_j p_ij v_j,  p_i = softmax_j(q_i . k_j / sqrt(d))

  over the positions j <= i of the segment of i. Query head h sees key and value
  head h // (H / K). Scores and softmax are float32.

  Args:
    queries: [B, Q, H, d].
    keys: [B, S, K, d].
    values: [B, S, K, d].
    q_segment_ids: i32 [B, Q], 0 is padding.
    kv_segment_ids: i32 [B, S].
    q_start: i32 [] or [B, 1, 1], the position of the first query among the
      keys.

  Returns:
    [B, Q, H, d] of the queries' dtype, 0 on padding.
  """
  rows, length, heads, size = queries.shape
  kv_heads = keys.shape[2]
  # Products of matrices, one for each row and key head: [B, K, G Q, d].
  grouped = queries.reshape(rows, length, kv_heads, heads // kv_heads, size)
  grouped = jnp.transpose(grouped, (0, 2, 3, 1, 4))
  keys, values = jnp.moveaxis(keys, 2, 1), jnp.moveaxis(values, 2, 1)
  scores = jnp.einsum(
    'bknd,bksd->bkns',
    grouped.reshape(rows, kv_heads, -1, size),
    keys,
    preferred_element_type=jnp.float32,
  ) / math.sqrt(size)
  scores = scores.reshape(*grouped.shape[:4], -1)
  q_ids, kv_ids = q_segment_ids[:, :, None], kv_segment_ids[:, None, :]
  same = (q_ids == kv_ids) & (q_ids > 0)
  iota = lambda dim: jax.lax.broadcasted_iota(jnp.int32, same.shape, dim)
  mask = (same & (iota(2) <= iota(1) + q_start))[:, None, None]
  scores = jnp.where(mask, scores, -1e30)
  weights = jnp.where(mask, jax.nn.softmax(scores), 0.0).astype(values.dtype)
  outputs = jnp.einsum(
    'bkns,bksd->bknd',
    weights.reshape(rows, kv_heads, -1, keys.shape[2]),
    values,
  ).reshape(grouped.shape)
  return jnp.transpose(outputs, (0, 3, 1, 2, 4)).reshape(queries.shape)


def _splash() -> Any:
  # Here, because it loads Pallas, which only TPUs need.
  from tunix_reverb.networks.transformer import splash_attention

  return splash_attention
