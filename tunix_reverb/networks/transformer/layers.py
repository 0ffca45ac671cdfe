"""One transformer block, on the devices of a mesh; inside `shard_map`.

Tensor parallelism after Shoeybi et al. 2019 with the sequence parallelism of
Korthikanti et al. 2022: between blocks every position is on one device; before
a matrix product the devices along `tensor` gather the positions of their shard,
each computes its heads or its MLP features for all of them, and the partial
sums are reduce-scattered back to positions. Under context parallelism queries
stay where they are and keys and values are gathered along `sequence`.

Per-device letters: b = B / (data * fsdp) rows, l = L / sequence positions of a
shard, o = l / tensor own positions, h and k = H and K / tensor heads, d head
size, D model size, f = F / tensor MLP features.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import rope
from tunix_reverb.sharding import positions


class Row(NamedTuple):
  """What all layers know of the positions of a row.

  Attributes:
    rotation: f32 [b, l, d / 2] each.
    segment_ids: i32 [b, l], 0 is padding.
    kv_segment_ids: i32 [b, L].
  """

  rotation: rope.Rotation
  segment_ids: jax.Array
  kv_segment_ids: jax.Array


Params = Mapping[str, jax.Array]
# `attention.Attention`, or what stands in for it: (queries, keys, values, their
# segment ids) -> outputs.
Attention = Callable[
  [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array
]


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
  """x / rms(x) * scale over the last dim (Zhang & Sennrich 2019).

  Args:
    x: [..., D].
    scale: f32 [D].
    epsilon: added to the mean square.

  Returns:
    f32 [..., D].
  """
  x = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  shape = (1,) * (x.ndim - 1) + scale.shape
  return x * jax.lax.rsqrt(mean_square + epsilon) * scale.reshape(shape)


def block(
  params: Params,
  x: jax.Array,
  row: Row,
  *,
  config: config_lib.TransformerConfig,
  attention: Attention,
) -> jax.Array:
  """Attention and MLP, each added to what comes in.

  Args:
    params: of one layer, gathered; norms f32, the rest of x's dtype.
    x: [b, o, D].
    row: of the batch.
    config: of the model.
    attention: for the mesh, or over a cache.

  Returns:
    [b, o, D].
  """
  x = x + _attend(params, x, row, config, attention)
  return x + _mlp(params, x, config)


def _attend(
  params: Params,
  x: jax.Array,
  row: Row,
  config: config_lib.TransformerConfig,
  attention: Attention,
) -> jax.Array:
  normed = rms_norm(x, params['attention_norm'], config.norm_epsilon)
  normed = positions.shard_from_own(normed.astype(x.dtype))  # [b, l, D]
  queries = _heads(params, 'query', normed, row, config)
  keys = _heads(params, 'key', normed, row, config)
  values = _heads(params, 'value', normed, row, config)
  outputs = attention(
    queries,  # [b, l, h, d]
    positions.row_from_shard(keys),  # [b, L, k, d]
    positions.row_from_shard(values),
    row.segment_ids,
    row.kv_segment_ids,
  )
  outputs = outputs.reshape(*outputs.shape[:2], -1)
  return positions.own_from_partial_sums(outputs @ params['output'])


def _heads(
  params: Params,
  name: str,
  x: jax.Array,
  row: Row,
  config: config_lib.TransformerConfig,
) -> jax.Array:
  """[b, l, D] -> [b, l, h or k, d]: projected, normed, turned."""
  projected = x @ params[name]
  if config.qkv_bias:
    projected = projected + params[f'{name}_bias'][None, None, :]
  heads = projected.reshape(*x.shape[:2], -1, config.head_size)
  if name == 'value':
    return heads
  if config.qk_norm:
    heads = rms_norm(heads, params[f'{name}_norm'], config.norm_epsilon)
  return rope.rotate(heads, row.rotation).astype(x.dtype)


def _mlp(
  params: Params, x: jax.Array, config: config_lib.TransformerConfig
) -> jax.Array:
  """SwiGLU (Shazeer 2020)."""
  normed = rms_norm(x, params['mlp_norm'], config.norm_epsilon)
  normed = positions.shard_from_own(normed.astype(x.dtype))  # [b, l, D]
  gated = jax.nn.silu(normed @ params['gate']) * (normed @ params['up'])
  return positions.own_from_partial_sums(gated @ params['down'])
