"""One token at a time: the transformer with a key and value cache.

Same params and same layers as `model.Transformer`, on one device, so that what
a policy says of a token while acting is what the learner computes of it later.
Letters: N slots, each with a sequence of its own at a place of its own, S
positions of the cache, V vocabulary, K key and value heads, d head size.
"""

from __future__ import annotations

from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from tunix_reverb import types
from tunix_reverb.networks.transformer import attention as attention_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import layers
from tunix_reverb.networks.transformer import rope
from tunix_reverb.sharding import mesh as mesh_lib


class Cache(NamedTuple):
  """Keys and values of all layers, [num_layers, N, S, K, d] each.

  Whatever stands behind a slot's position is not read: a slot begins anew by
  going back to position 0.
  """

  keys: jax.Array
  values: jax.Array


def empty_cache(
  config: config_lib.TransformerConfig,
  *,
  num_slots: int,
  length: int,
  dtype: str,
) -> Cache:
  """A cache of `num_slots` sequences of up to `length` tokens."""
  shape = (
    config.num_layers,
    num_slots,
    length,
    config.num_kv_heads,
    config.head_size,
  )
  cache = Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
  # As `decode` returns it, or its second call would compile anew.
  return mesh_lib.replicate(cache, _mesh())


def decode(
  config: config_lib.TransformerConfig,
  params: types.Nest,
  cache: Cache,
  tokens: jax.Array,
  positions: jax.Array,
) -> tuple[jax.Array, Cache]:
  """Reads one token per slot and says what may come next.

  Args:
    config: what the model is.
    params: whole, f32.
    cache: computed in its dtype.
    tokens: i32 [N].
    positions: i32 [N], of the tokens in their sequences, below S; all before
      it have been read.

  Returns:
    (log-probabilities of the next token f32 [N, V], the cache with this one).
  """
  chex.assert_rank([tokens, positions], 1)
  chex.assert_equal_shape([tokens, positions])
  whole = mesh_lib.replicated_spec()
  return mesh_lib.shard_map(
    lambda *args: _decode(config, *args),
    mesh=_mesh(),
    in_specs=whole,
    out_specs=whole,
  )(params, cache, tokens, positions)


def _mesh() -> jax.sharding.Mesh:
  """Of one device: the layers are written for the devices of a mesh."""
  return mesh_lib.make_mesh(jax.local_devices()[:1], data=1)


def _decode(
  config: config_lib.TransformerConfig,
  params: types.Nest,
  cache: Cache,
  tokens: jax.Array,
  positions: jax.Array,
) -> tuple[jax.Array, Cache]:
  dtype = cache.keys.dtype
  # Read are the positions up to this one, as one segment.
  is_read = jnp.arange(cache.keys.shape[2])[None, :] <= positions[:, None]
  row = layers.Row(
    rope.rotation(config, positions[:, None]),
    jnp.ones((tokens.size, 1), jnp.int32),
    is_read.astype(jnp.int32),
  )

  def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Cache]:
    params, own_cache = layer
    attention = _CachedAttention(own_cache, positions)
    cast = {
      name: param if name.endswith('_norm') else param.astype(dtype)
      for name, param in params.items()
    }
    x = layers.block(cast, x, row, config=config, attention=attention)
    return x, attention.cache

  x = params['embedding'][tokens][:, None, :].astype(dtype)
  x, cache = jax.lax.scan(body, x, (params['layers'], cache))
  features = layers.rms_norm(x, params['final_norm'], config.norm_epsilon)
  head = params['embedding' if config.tied_embeddings else 'head']
  logits = jnp.einsum('nod,vd->nv', features, head, precision='highest')
  return jax.nn.log_softmax(logits), cache


class _CachedAttention:
  """`attention.Attention` of one query per slot, over the cache.

  Attributes:
    cache: of one layer, [N, S, K, d]; after the call with the keys and values
      of this position.
  """

  def __init__(self, cache: Cache, positions: jax.Array):
    self.cache = cache
    self._positions = positions

  def __call__(
    self,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    q_segment_ids: jax.Array,
    kv_segment_ids: jax.Array,
  ) -> jax.Array:
    slots = jnp.arange(self._positions.size)
    write = lambda kept, new: kept.at[slots, self._positions].set(new[:, 0])
    self.cache = Cache(
      write(self.cache.keys, keys), write(self.cache.values, values)
    )
    return attention_lib.reference_attention(
      queries,
      *self.cache,
      q_segment_ids,
      kv_segment_ids,
      q_start=self.cache.keys.shape[1],
    )
