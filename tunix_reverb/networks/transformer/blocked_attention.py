"""Attention in blocks, with memory linear in the length, on any backend.

The online softmax of FlashAttention (Dao et al. 2022) in plain JAX: queries
and keys meet block by block, the forward pass keeps each query's output and
log-normaliser, and the backward pass computes the probabilities again. Blocks
of keys that no query of a block may see, because they come later or belong to
other segments, are not computed: a row of many short segments costs what the
segments cost.

Letters: B rows, Q and S positions of queries and keys, H query heads, K key
and value heads, G = H / K, d head size, q and s positions of a block, n = Q / q
blocks of queries, m = S / s blocks of keys.
"""

from __future__ import annotations

import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

# The name under which remat policies find what the backward pass needs.
RESIDUAL = 'attention'
# Stands for minus infinity where infinity would make inf - inf.
_MASKED = -1e30

_named: Any = ad_checkpoint.checkpoint_name  # type: ignore[attr-defined]


class _Queries(NamedTuple):
  """What is known of the blocks of queries before any softmax.

  Attributes:
    segment_ids: i32 [n, B, q].
    start: i32 [n], position among the keys of each block's first query.
    first: i32 [n], the first block of keys that a query may see.
    end: i32 [n], one past the last such block; equal to `first` for none.
  """

  segment_ids: jax.Array
  start: jax.Array
  first: jax.Array
  end: jax.Array


def blocked_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
  *,
  q_start: jax.Array | int,
  block: int,
) -> jax.Array:
  """See `attention.reference_attention`.

  Args:
    queries: [B, Q, H, d].
    keys: [B, S, K, d].
    values: [B, S, K, d].
    q_segment_ids: i32 [B, Q], 0 is padding.
    kv_segment_ids: i32 [B, S].
    q_start: i32 [], the position of the first query among the keys.
    block: positions of a block; lengths need not be multiples.

  Returns:
    [B, Q, H, d], 0 on padding.
  """
  rows, length, heads, size = queries.shape
  kv_heads = keys.shape[2]
  q_block = min(block, length)
  kv_block = min(block, keys.shape[1])
  # [n, B, K, G, q, d], [B, K, S, d] and [n, B, q]
  q_blocks = _pad(queries, q_block).reshape(
    rows, -1, q_block, kv_heads, heads // kv_heads, size
  )
  q_blocks = jnp.transpose(q_blocks, (1, 0, 3, 4, 2, 5))
  keys, values = (jnp.moveaxis(_pad(x, kv_block), 2, 1) for x in (keys, values))
  q_ids = _pad(q_segment_ids, q_block).reshape(rows, -1, q_block)
  kv_ids = _pad(kv_segment_ids, kv_block)
  outputs = _attention(
    q_blocks,
    keys,
    values,
    _plan(jnp.moveaxis(q_ids, 1, 0), kv_ids, q_start, kv_block),
    kv_ids,
    kv_block,
  )
  outputs = jnp.transpose(outputs, (1, 0, 4, 2, 3, 5))
  return outputs.reshape(rows, -1, heads, size)[:, :length]


def _pad(x: jax.Array, block: int) -> jax.Array:
  """Pads dim 1 with 0, which is padding's segment id, to whole blocks."""
  pad = -x.shape[1] % block
  return jnp.pad(x, [(0, pad if dim == 1 else 0) for dim in range(x.ndim)])


def _plan(
  q_ids: jax.Array,
  kv_ids: jax.Array,
  q_start: jax.Array | int,
  kv_block: int,
) -> _Queries:
  """Bounds that leave out no visible key; one pair for all rows."""
  num_blocks, rows, q_block = q_ids.shape
  q_low, q_high = _id_range(q_ids)  # [n, B]
  kv_low, kv_high = _id_range(kv_ids.reshape(rows, -1, kv_block))  # [B, m]
  overlap = (q_low[:, :, None] <= kv_high[None]) & (
    kv_low[None] <= q_high[:, :, None]
  )
  starts = q_start + q_block * jnp.arange(num_blocks, dtype=jnp.int32)
  kv_starts = kv_block * jnp.arange(kv_low.shape[1], dtype=jnp.int32)
  earlier = kv_starts[None, :] < starts[:, None] + q_block
  needed = jnp.any(overlap, axis=1) & earlier  # [n, m]
  first = jnp.argmax(needed, axis=1).astype(jnp.int32)
  last = jnp.argmax(needed[:, ::-1], axis=1).astype(jnp.int32)
  end = jnp.where(jnp.any(needed, axis=1), needed.shape[1] - last, first)
  return _Queries(q_ids, starts, first, end)


def _id_range(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Lowest and highest segment id of [..., block]; padding alone has none."""
  most = jnp.iinfo(jnp.int32).max
  low = jnp.min(jnp.where(blocks > 0, blocks, most), axis=-1)
  return low, jnp.max(jnp.where(blocks > 0, blocks, -1), axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
  q_blocks: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  plan: _Queries,
  kv_ids: jax.Array,
  kv_block: int,
) -> jax.Array:
  """[n, B, K, G, q, d] of queries -> the same of outputs."""
  return _forward(q_blocks, keys, values, plan, kv_ids, kv_block)[0]


def _attention_fwd(
  q_blocks: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  plan: _Queries,
  kv_ids: jax.Array,
  kv_block: int,
) -> tuple[jax.Array, tuple[Any, ...]]:
  outputs, log_normalisers = _forward(
    q_blocks, keys, values, plan, kv_ids, kv_block
  )
  outputs = _named(outputs, RESIDUAL)
  log_normalisers = _named(log_normalisers, RESIDUAL)
  residuals = (q_blocks, keys, values, plan, kv_ids, outputs, log_normalisers)
  return outputs, residuals


def _forward(
  q_blocks: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  plan: _Queries,
  kv_ids: jax.Array,
  kv_block: int,
) -> tuple[jax.Array, jax.Array]:
  """(outputs like q_blocks, log-normalisers f32 [n, B, K, G, q])."""

  def q_body(
    _: tuple[()], inputs: tuple[jax.Array, _Queries]
  ) -> tuple[tuple[()], tuple[jax.Array, jax.Array]]:
    q, queries = inputs

    def kv_body(
      j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
      maximum, total, weighted = carry
      k, v = _block(keys, j, kv_block), _block(values, j, kv_block)
      mask = _mask(queries, kv_ids, j, kv_block)
      scores = jnp.where(mask, _scores(q, k), _MASKED)
      new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
      # The mask again: where nothing is visible yet, exp(0) would be 1.
      weights = jnp.where(mask, jnp.exp(scores - new_maximum[..., None]), 0.0)
      shrink = jnp.exp(maximum - new_maximum)
      return (
        new_maximum,
        total * shrink + jnp.sum(weights, axis=-1),
        weighted * shrink[..., None]
        + _dot('bkgqs,bksd->bkgqd', weights.astype(v.dtype), v),
      )

    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    maximum, total, weighted = jax.lax.fori_loop(
      queries.first,
      queries.end,
      kv_body,
      (zeros + _MASKED, zeros, jnp.zeros(q.shape, jnp.float32)),
    )
    total = jnp.where(total > 0, total, 1.0)  # Padding sees nothing.
    outputs = (weighted / total[..., None]).astype(q.dtype)
    return (), (outputs, maximum + jnp.log(total))

  _, (outputs, log_normalisers) = jax.lax.scan(q_body, (), (q_blocks, plan))
  return outputs, log_normalisers


def _attention_bwd(
  kv_block: int, residuals: tuple[Any, ...], d_outputs: jax.Array
) -> tuple[jax.Array | None, ...]:
  q_blocks, keys, values, plan, kv_ids, outputs, log_normalisers = residuals
  # Sum over keys of a probability times its cotangent, f32 [n, B, K, G, q].
  corrections = jnp.sum(
    outputs.astype(jnp.float32) * d_outputs.astype(jnp.float32), axis=-1
  )

  def q_body(
    carry: tuple[jax.Array, jax.Array], inputs: tuple[Any, ...]
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    q, queries, d_output, log_normaliser, correction = inputs

    def kv_body(
      j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
      d_q, d_keys, d_values = carry
      k, v = _block(keys, j, kv_block), _block(values, j, kv_block)
      mask = _mask(queries, kv_ids, j, kv_block)
      exponent = _scores(q, k) - log_normaliser[..., None]
      probs = jnp.where(mask, jnp.exp(exponent), 0.0)
      d_probs = _dot('bkgqd,bksd->bkgqs', d_output, v)
      d_scores = probs * (d_probs - correction[..., None]) * _scale(q)
      d_scores, probs = d_scores.astype(q.dtype), probs.astype(q.dtype)
      d_k = _dot('bkgqs,bkgqd->bksd', d_scores, q)
      d_v = _dot('bkgqs,bkgqd->bksd', probs, d_output)
      return (
        d_q + _dot('bkgqs,bksd->bkgqd', d_scores, k),
        _add_to_block(d_keys, d_k, j),
        _add_to_block(d_values, d_v, j),
      )

    d_q, d_keys, d_values = jax.lax.fori_loop(
      queries.first,
      queries.end,
      kv_body,
      (jnp.zeros(q.shape, jnp.float32), *carry),
    )
    return (d_keys, d_values), d_q.astype(q.dtype)

  zeros = jnp.zeros(keys.shape, jnp.float32)
  (d_keys, d_values), d_queries = jax.lax.scan(
    q_body,
    (zeros, zeros),
    (q_blocks, plan, d_outputs, log_normalisers, corrections),
  )
  return (
    d_queries,
    d_keys.astype(keys.dtype),
    d_values.astype(values.dtype),
    None,
    None,
  )


_attention.defvjp(_attention_fwd, _attention_bwd)


def _mask(
  queries: _Queries, kv_ids: jax.Array, j: jax.Array, kv_block: int
) -> jax.Array:
  """bool [B, 1, 1, q, s]: which queries of a block see which keys of block j?

  `queries` is of one block, without the leading n.
  """
  q_ids = queries.segment_ids[:, :, None]
  same = (q_ids == _block(kv_ids, j, kv_block, 1)[:, None, :]) & (q_ids > 0)
  iota = lambda dim: jax.lax.broadcasted_iota(jnp.int32, same.shape, dim)
  causal = j * kv_block + iota(2) <= queries.start + iota(1)
  return (same & causal)[:, None, None]


def _scale(q: jax.Array) -> float:
  return 1 / math.sqrt(q.shape[-1])


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
  """f32 [B, K, G, q, s]."""
  return _dot('bkgqd,bksd->bkgqs', q, k) * _scale(q)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _block(x: jax.Array, j: jax.Array, block: int, dim: int = 2) -> jax.Array:
  """The j-th block of `dim`."""
  return jax.lax.dynamic_slice_in_dim(x, j * block, block, dim)


def _add_to_block(total: jax.Array, x: jax.Array, j: jax.Array) -> jax.Array:
  """Adds x [B, K, s, d] to the j-th block of total [B, K, S, d]."""
  block = x.shape[2]
  return jax.lax.dynamic_update_slice_in_dim(
    total, _block(total, j, block) + x, j * block, 2
  )
