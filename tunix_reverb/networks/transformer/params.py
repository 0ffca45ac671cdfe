"""The params of a transformer: names, shapes, where they go, first values.

Letters: V vocabulary, N layers, D model, F MLP, H query heads, K key and value
heads, d head size. Params of the N layers are stacked, so that one scan goes
over them. `fsdp` and `sequence` together split D, which is gathered where a
param is used; `tensor` splits heads, F and V, which stay split. Norms, biases
and the value head are small and whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math

import jax
import jax.numpy as jnp

from tunix_reverb import types
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.sharding import mesh as mesh_lib

_P = mesh_lib.PartitionSpec
_D = mesh_lib.PARAM_AXES
_T = mesh_lib.TENSOR


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """One param.

  Attributes:
    shape: global.
    spec: how it is split.
    scale: standard deviation of the first values around `mean`; 0 for none.
    mean: of the first values.
  """

  shape: tuple[int, ...]
  spec: jax.sharding.PartitionSpec
  scale: float = 0.0
  mean: float = 0.0


def specs(config: config_lib.TransformerConfig) -> types.Nest:
  """Nest of `PartitionSpec`, like the params."""
  return _map(lambda leaf: leaf.spec, config)


def shapes(config: config_lib.TransformerConfig) -> types.Nest:
  """Nest of `jax.ShapeDtypeStruct` of global shapes, all float32."""
  return _map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), config
  )


def count(config: config_lib.TransformerConfig) -> int:
  """How many numbers the params hold, value head included."""
  return sum(
    math.prod(x.shape) for x in jax.tree_util.tree_leaves(shapes(config))
  )


def init(config: config_lib.TransformerConfig, key: jax.Array) -> types.Nest:
  """Fresh params, f32; see `shards.create` for how to make them in shards.

  Matrices are normal with `config.init_scale`; those that write into the
  residual stream are smaller by sqrt(2 N) (Radford et al. 2019), so that its
  size does not grow with depth. The value head starts at 0.
  """
  leaves, treedef = jax.tree_util.tree_flatten(_layout(config))
  keys = jax.random.split(key, len(leaves))
  values = [_first_values(leaf, k) for leaf, k in zip(leaves, keys)]
  return jax.tree_util.tree_unflatten(treedef, values)


def _first_values(leaf: _Leaf, key: jax.Array) -> jax.Array:
  if not leaf.scale:
    return jnp.full(leaf.shape, leaf.mean, jnp.float32)
  return leaf.scale * jax.random.normal(key, leaf.shape, jnp.float32)


def _map(
  fn: Callable[[_Leaf], object], config: config_lib.TransformerConfig
) -> types.Nest:
  return jax.tree_util.tree_map(fn, _layout(config))


def _layout(config: config_lib.TransformerConfig) -> types.Nest:
  """Nest of `_Leaf`."""
  vocabulary = _Leaf(
    (config.vocabulary_size, config.model_size), _P(_T, _D), config.init_scale
  )
  norm = _Leaf((config.model_size,), _P(), mean=1.0)
  trunk = {
    'embedding': vocabulary,
    'layers': _attention(config) | _mlp(config),
    'final_norm': norm,
  }
  layout = {
    **trunk,
    'value_head': {
      'kernel': _Leaf((config.model_size,), _P()),
      'bias': _Leaf((), _P()),
    },
  }
  if not config.tied_embeddings:
    layout['head'] = vocabulary
  if config.value_trunk:
    layout['value_trunk'] = trunk
  return layout


def _attention(config: config_lib.TransformerConfig) -> dict[str, _Leaf]:
  n, d_model = config.num_layers, config.model_size
  queries = config.num_heads * config.head_size
  keys = config.num_kv_heads * config.head_size
  scale = config.init_scale
  leaves = {
    'attention_norm': _Leaf((n, d_model), _P(), mean=1.0),
    'query': _Leaf((n, d_model, queries), _P(None, _D, _T), scale),
    'key': _Leaf((n, d_model, keys), _P(None, _D, _T), scale),
    'value': _Leaf((n, d_model, keys), _P(None, _D, _T), scale),
    'output': _Leaf(
      (n, queries, d_model), _P(None, _T, _D), _residual_scale(config)
    ),
  }
  if config.qkv_bias:
    leaves |= {
      'query_bias': _Leaf((n, queries), _P(None, _T)),
      'key_bias': _Leaf((n, keys), _P(None, _T)),
      'value_bias': _Leaf((n, keys), _P(None, _T)),
    }
  if config.qk_norm:
    norm = _Leaf((n, config.head_size), _P(), mean=1.0)
    leaves |= {'query_norm': norm, 'key_norm': norm}
  return leaves


def _mlp(config: config_lib.TransformerConfig) -> dict[str, _Leaf]:
  n, d_model, f = config.num_layers, config.model_size, config.mlp_size
  up = _Leaf((n, d_model, f), _P(None, _D, _T), config.init_scale)
  return {
    'mlp_norm': _Leaf((n, d_model), _P(), mean=1.0),
    'gate': up,
    'up': up,
    'down': _Leaf((n, f, d_model), _P(None, _T, _D), _residual_scale(config)),
  }


def _residual_scale(config: config_lib.TransformerConfig) -> float:
  return config.init_scale / math.sqrt(2 * config.num_layers)
