"""The transformer with a key and value cache: reads tokens, says the next.

Same params and same layers as `model.Transformer`, on one device, so that what
a policy says of a token while acting is what the learner computes of it later.
A call reads up to C tokens of each of K sequences: one each while they are
written, many each of prompts and tool output. Only the slots named are read and
written, so that a call costs what they need, whatever else the cache holds.

Letters: N slots, each with a sequence of its own at a place of its own, K of
them in a call, C tokens of each, S positions of the cache, V vocabulary, k key
and value heads, d head size.
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
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.networks.transformer import rope
from tunix_reverb.sharding import mesh as mesh_lib


class Cache(NamedTuple):
  """Keys and values of all layers, [num_layers, N, S, k, d] each.

  Whatever stands behind a slot's position is not read: a slot begins anew by
  going back to position 0.
  """

  keys: jax.Array
  values: jax.Array


class Reading(NamedTuple):
  """What a call reads.

  Attributes:
    slots: i32 [K], all different; N or more is none, to fill up K.
    tokens: i32 [K, C].
    starts: i32 [K], position of each slot's first token; all before it have
      been read.
    counts: i32 [K], how many of the C tokens there are, 1 to C.
  """

  slots: jax.Array
  tokens: jax.Array
  starts: jax.Array
  counts: jax.Array


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
  # As `read` returns it, or its second call would compile anew.
  return mesh_lib.replicate(cache, _mesh())


def prepare(params: types.Nest, dtype: str) -> types.Nest:
  """`params` f32 as `read` takes them: matrices of layers in `dtype`.

  Without those of the values, for which acting has no use. Once for each
  version, not in every call.
  """
  cast = {
    name: param if name.endswith('_norm') else param.astype(dtype)
    for name, param in params['layers'].items()
  }
  values = ('value_head', 'value_trunk')
  policy = {k: v for k, v in params.items() if k not in values}
  return {**policy, 'layers': cast}


def prepared_shapes(
  config: config_lib.TransformerConfig, dtype: str
) -> types.Nest:
  """Shapes and dtypes of what `prepare` returns."""
  return jax.eval_shape(
    lambda params: prepare(params, dtype), params_lib.shapes(config)
  )


def place(params: types.Nest) -> types.Nest:
  """Prepared params on the device that `read` runs on."""
  return mesh_lib.replicate(params, _mesh())


def read(
  config: config_lib.TransformerConfig,
  params: types.Nest,
  cache: Cache,
  reading: Reading,
  *,
  temperature: float = 1.0,
) -> tuple[jax.Array, Cache]:
  """Reads tokens and says what may come next.

  Args:
    config: what the model is.
    params: whole, see `prepare`.
    cache: computed in its dtype; donate it, or it is copied.
    reading: the tokens.
    temperature: by which the logits are divided, as the learner does.

  Returns:
    (log-probabilities of what follows each slot's last token f32 [K, V], the
    cache with these tokens).
  """
  chex.assert_rank(list(reading), [1, 2, 1, 1])
  chex.assert_type(list(reading), jnp.int32)
  whole = mesh_lib.replicated_spec()
  return mesh_lib.shard_map(
    lambda *args: _read(config, *args, temperature=temperature),
    mesh=_mesh(),
    in_specs=whole,
    out_specs=whole,
  )(params, cache, reading)


def _mesh() -> jax.sharding.Mesh:
  """Of one device: the layers are written for the devices of a mesh."""
  return mesh_lib.make_mesh(jax.local_devices()[:1], data=1)


def _read(
  config: config_lib.TransformerConfig,
  params: types.Nest,
  cache: Cache,
  reading: Reading,
  *,
  temperature: float,
) -> tuple[jax.Array, Cache]:
  dtype = cache.keys.dtype
  offsets = jax.lax.broadcasted_iota(jnp.int32, reading.tokens.shape, 1)
  places = reading.starts[:, None] + offsets
  is_token = offsets < reading.counts[:, None]
  row = layers.Row(
    rope.rotation(config, places),
    is_token.astype(jnp.int32),
    jnp.ones((reading.slots.size, cache.keys.shape[2]), jnp.int32),
  )
  # What is written beyond the end is dropped.
  places = jnp.where(is_token, places, cache.keys.shape[2])

  def body(carry: Any, layer: Any) -> tuple[Any, tuple[()]]:
    x, cache = carry
    index, params = layer
    attention = _CachedAttention(cache, index, reading, places)
    x = layers.block(params, x, row, config=config, attention=attention)
    return (x, attention.cache), ()

  x = params['embedding'][reading.tokens].astype(dtype)
  # The cache is carried, not scanned over: else all of it would be copied.
  indices = jnp.arange(config.num_layers, dtype=jnp.int32)
  (x, cache), _ = jax.lax.scan(body, (x, cache), (indices, params['layers']))
  last = reading.counts[:, None, None] - 1
  x = jnp.take_along_axis(x, last, axis=1)[:, 0]
  features = layers.rms_norm(x, params['final_norm'], config.norm_epsilon)
  head = params['embedding' if config.tied_embeddings else 'head']
  logits = jnp.einsum(
    'nd,vd->nv', features / temperature, head, precision='highest'
  )
  return jax.nn.log_softmax(logits), cache


class _CachedAttention:
  """`attention.Attention` of some slots' new tokens, over the cache.

  Attributes:
    cache: after the call with the keys and values of these tokens.
  """

  def __init__(
    self, cache: Cache, layer: jax.Array, reading: Reading, places: jax.Array
  ):
    self.cache = cache
    self._layer = layer
    self._reading = reading
    self._places = places

  def __call__(
    self,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    q_segment_ids: jax.Array,
    kv_segment_ids: jax.Array,
  ) -> jax.Array:
    layer, slots = self._layer, self._reading.slots
    self.cache = Cache(
      *(
        kept.at[layer, slots[:, None], self._places].set(new, mode='drop')
        for kept, new in zip(self.cache, (keys, values))
      )
    )
    keys, values = (
      kept.at[layer, slots].get(mode='clip') for kept in self.cache
    )
    return attention_lib.reference_attention(
      queries,
      keys,
      values,
      q_segment_ids,
      kv_segment_ids,
      q_start=self._reading.starts[:, None, None],
    )
