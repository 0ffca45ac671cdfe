"""Attention on NVIDIA GPUs: cuDNN's fused kernel through `jax.nn`.

The kernel takes segments only as a mask [B, 1, q, S], so queries go through it
in blocks, each against the keys up to its last position: memory stays linear in
the length, and what causal order hides is mostly not computed.

Letters as in `blocked_attention.py`.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

# The kernel's longest head on all GPUs that have it.
_MAX_HEAD_SIZE = 128


def objection(queries: jax.Array) -> str:
  """What the kernel needs that these queries [B, Q, H, d] have not, or ''."""
  if queries.dtype != jnp.bfloat16:
    return f'bfloat16, not {queries.dtype}'
  size = queries.shape[-1]
  if size > _MAX_HEAD_SIZE or size % 8:
    return (
      f'a head_size ({size}) that is a multiple of 8 and at most '
      f'{_MAX_HEAD_SIZE}'
    )
  return ''


def cudnn_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
  *,
  q_start: jax.Array | int,
  block: int,
  implementation: Literal['xla', 'cudnn'] = 'cudnn',
) -> jax.Array:
  """See `attention.reference_attention`.

  Args:
    queries: bf16 [B, Q, H, d].
    keys: bf16 [B, S, K, d].
    values: bf16 [B, S, K, d].
    q_segment_ids: i32 [B, Q], 0 is padding.
    kv_segment_ids: i32 [B, S].
    q_start: i32 [], the position of the first query among the keys.
    block: queries at a time.
    implementation: of `jax.nn.dot_product_attention`; tests pass 'xla'.

  Returns:
    [B, Q, H, d], 0 on padding.
  """
  length, kv_length = queries.shape[1], keys.shape[1]
  outputs = []
  for first in range(0, length, block):
    last = min(first + block, length)
    # Known when compiling unless rows are split over devices.
    end = q_start + last if isinstance(q_start, int) else kv_length
    q_ids = q_segment_ids[:, first:last]
    outputs.append(
      jax.nn.dot_product_attention(
        queries[:, first:last],
        keys[:, :end],
        values[:, :end],
        mask=_mask(q_ids, kv_segment_ids[:, :end], q_start + first),
        implementation=implementation,
      )
    )
  joined = jnp.concatenate(outputs, axis=1)
  # To the mask padding is a segment too: a query that saw nothing would be NaN.
  is_padding = (q_segment_ids == 0)[:, :, None, None]
  return jnp.where(is_padding, jnp.zeros_like(joined), joined)


def _mask(
  q_ids: jax.Array, kv_ids: jax.Array, q_start: jax.Array | int
) -> jax.Array:
  """bool [B, 1, q, s]."""
  same = q_ids[:, :, None] == kv_ids[:, None, :]
  iota = lambda dim: jax.lax.broadcasted_iota(jnp.int32, same.shape, dim)
  return (same & (iota(2) <= iota(1) + q_start))[:, None]
