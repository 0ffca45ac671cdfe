"""A transformer policy with a value head, sharded over a mesh.

  model = model_lib.make_transformer(config, mesh)
  params = model.init(key)               # global arrays, made in shards
  outputs = model.apply(params, ...)     # inside shard_map, see below

`apply` runs inside one `shard_map` over (data, fsdp, sequence, tensor) that the
caller opens, so that loss, gradients and optimiser share it:

  def loss(params, tokens, next_tokens, segment_ids, segment_positions):
    outputs = model.apply(...)
    share = ...  # A sum over this device's own positions.
    return share

  in_specs:  params: model.param_specs, the rest: mesh.token_spec()
  out_specs: what `apply` returns: mesh.position_spec()

Global shapes are [B, L]. Inside, tokens are [B / (data * fsdp), L / sequence]
and the same on all devices along `tensor`; outputs are [B / (data * fsdp),
L / (sequence * tensor)], each position on one device only. What else a loss
needs per position (rewards, masks) comes in like tokens and is cut down by
`positions.own_from_shard`; what it needs of whole rows (V-trace) is put
together by `positions.row_from_own`. `gradients.accumulate` differentiates it.

On one device the same code runs on a mesh of 1 x 1 x 1 x 1.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from tunix_reverb import types
from tunix_reverb.networks.transformer import attention as attention_lib
from tunix_reverb.networks.transformer import blocked_attention
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import layers
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.networks.transformer import rope
from tunix_reverb.ops import token_log_probs
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import positions
from tunix_reverb.sharding import shards

_checkpoint: Any = jax.checkpoint  # type: ignore[attr-defined]


class TokenOutputs(NamedTuple):
  """What the policy says at each position; all f32 [B, L].

  Attributes:
    log_prob: of the next token that was given; 0 where it is out of range.
    entropy: of the distribution over the next token, nats.
    value: value estimate.
  """

  log_prob: jax.Array
  entropy: jax.Array
  value: jax.Array


@dataclasses.dataclass(frozen=True)
class Transformer:
  """Pure functions of params; build it with `make_transformer`.

  Attributes:
    config: what the model is.
    compute: how it is computed.
    mesh: where.
    param_specs: nest of `PartitionSpec`, like the params.
    temperature: by which the logits of the policy are divided.
  """

  config: config_lib.TransformerConfig
  compute: config_lib.ComputeConfig
  mesh: jax.sharding.Mesh
  param_specs: types.Nest
  temperature: float = 1.0

  def init(self, key: jax.Array) -> types.Nest:
    """Fresh params, f32, as global arrays split by `param_specs`."""
    init = functools.partial(params_lib.init, self.config)
    return shards.create(init, self.mesh, self.param_specs, key=key)

  def apply(
    self,
    params: types.Nest,
    tokens: jax.Array,
    next_tokens: jax.Array,
    segment_ids: jax.Array,
    segment_positions: jax.Array,
  ) -> TokenOutputs:
    """All positions of packed rows; inside `shard_map`, per-device shapes.

    b = B / (data * fsdp), l = L / sequence, o = l / tensor.

    Args:
      params: this device's shards.
      tokens: i32 [b, l].
      next_tokens: i32 [b, l], whose log-probs are asked for.
      segment_ids: i32 [b, l], 1..S ascending within a row, 0 is padding.
      segment_positions: i32 [b, l], 0 at the first position of a segment.

    Returns:
      `TokenOutputs` of [b, o].

    Raises:
      ValueError: the positions do not divide evenly over `tensor`.
    """
    arrays = (tokens, next_tokens, segment_ids, segment_positions)
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    chex.assert_type(arrays, jnp.int32)
    self._check_length(tokens.shape[1])

    row = layers.Row(
      rope.rotation(self.config, segment_positions),
      segment_ids,
      positions.row_from_shard(segment_ids),
    )
    features = self._features(params, self.param_specs, tokens, row)
    value_features = features
    if self.config.value_trunk:
      value_features = self._features(
        params['value_trunk'], self.param_specs['value_trunk'], tokens, row
      )
    own_next = positions.own_from_shard(next_tokens, self.mesh)
    log_prob, entropy = self._policy_head(params, features, own_next)
    value = _value_head(params['value_head'], value_features)
    return TokenOutputs(log_prob, entropy, value)

  def _check_length(self, length: int) -> None:
    size = self.mesh.shape[mesh_lib.TENSOR]
    if length % size:
      raise ValueError(
        f'positions per device along {mesh_lib.SEQUENCE} ({length}) must be a '
        f'multiple of the devices along {mesh_lib.TENSOR} ({size})'
      )

  def _gather(self, params: types.Nest, name: str, dtype: Any) -> jax.Array:
    return shards.gather(params[name], self.param_specs[name], dtype)

  def _features(
    self,
    params: types.Nest,
    param_specs: types.Nest,
    tokens: jax.Array,
    row: layers.Row,
  ) -> jax.Array:
    """What a trunk makes of i32 [b, l], f32 [b, o, D]."""
    x = self._embed(params['embedding'], param_specs['embedding'], tokens)
    x = self._layers(params['layers'], param_specs['layers'], x, row)
    return layers.rms_norm(x, params['final_norm'], self.config.norm_epsilon)

  def _embed(
    self,
    table: jax.Array,
    spec: jax.sharding.PartitionSpec,
    tokens: jax.Array,
  ) -> jax.Array:
    """i32 [b, l] -> [b, o, D]."""
    table = shards.gather(table, spec, self.compute.dtype)
    size = table.shape[0]
    index = tokens - jax.lax.axis_index(mesh_lib.TENSOR) * jnp.int32(size)
    is_here = (index >= 0) & (index < size)
    x = table[jnp.where(is_here, index, 0)]
    x = jnp.where(is_here[..., None], x, jnp.zeros_like(x))
    return positions.own_from_partial_sums(x)

  def _layers(
    self,
    params: types.Nest,
    param_specs: types.Nest,
    x: jax.Array,
    row: layers.Row,
  ) -> jax.Array:
    attention = attention_lib.Attention(
      self.mesh, self.compute.attention, self.compute.attention_block
    )

    def body(x: jax.Array, layer: types.Nest) -> tuple[jax.Array, tuple[()]]:
      x = layers.block(
        self._gather_layer(layer, param_specs),
        x,
        row,
        config=self.config,
        attention=attention,
      )
      return x, ()

    policy = _REMAT_POLICIES[self.compute.remat]
    # The scan already keeps XLA from merging the two computations.
    body = _checkpoint(body, policy=policy, prevent_cse=False)
    x, _ = jax.lax.scan(body, x, params)
    return x

  def _gather_layer(
    self, layer: types.Nest, specs: types.Nest
  ) -> dict[str, jax.Array]:
    """Shards of one layer -> what `layers.block` takes."""
    return {
      name: shards.gather(
        shard,
        # Without the dim that the scan goes over.
        mesh_lib.PartitionSpec(*specs[name][1:]),
        'float32' if name.endswith('_norm') else self.compute.dtype,
      )
      for name, shard in layer.items()
    }

  def _policy_head(
    self, params: types.Nest, features: jax.Array, next_tokens: jax.Array
  ) -> token_log_probs.TokenLogProbs:
    """f32 [b, o, D], i32 [b, o] -> both f32 [b, o]."""
    name = 'embedding' if self.config.tied_embeddings else 'head'
    # As `decoding` does: the logits are linear in the features, which are
    # fewer.
    features = features / self.temperature
    outputs = token_log_probs.token_log_probs(
      features.reshape(-1, features.shape[-1]),
      self._gather(params, name, jnp.float32),
      next_tokens.reshape(-1),
      axis=mesh_lib.TENSOR,
      block=self.compute.head_block,
      precision=self.compute.head_precision,
    )
    return jax.tree_util.tree_map(
      lambda x: x.reshape(next_tokens.shape), outputs
    )


def make_transformer(
  config: config_lib.TransformerConfig,
  mesh: jax.sharding.Mesh,
  compute: config_lib.ComputeConfig | None = None,
  *,
  temperature: float = 1.0,
) -> Transformer:
  """Builds the model for a mesh.

  Args:
    config: what the model is; see `presets.get`.
    mesh: see `mesh.make_mesh`.
    compute: how it is computed; the defaults of `ComputeConfig` if None.
    temperature: the policy is softmax(logits / temperature), for whoever
      samples it and for whoever learns, > 0.

  Raises:
    ValueError: a size of the model does not divide evenly over the mesh, or
      the temperature is not above 0.
  """
  if not temperature > 0:
    raise ValueError(f'temperature ({temperature}) must be > 0')
  tensor = mesh.shape[mesh_lib.TENSOR]
  for name in ('vocabulary_size', 'num_heads', 'num_kv_heads', 'mlp_size'):
    _check_divides(name, getattr(config, name), (mesh_lib.TENSOR,), tensor)
  split = 1
  for axis in mesh_lib.PARAM_AXES:
    split *= mesh.shape[axis]
  _check_divides('model_size', config.model_size, mesh_lib.PARAM_AXES, split)
  return Transformer(
    config,
    compute or config_lib.ComputeConfig(),
    mesh,
    params_lib.specs(config),
    temperature,
  )


def _check_divides(
  name: str, value: int, axes: tuple[str, ...], size: int
) -> None:
  if value % size:
    raise ValueError(
      f'{name} ({value}) must be a multiple of the devices along '
      f'{" x ".join(axes)} ({size})'
    )


def _value_head(params: types.Nest, features: jax.Array) -> jax.Array:
  """f32 [b, o, D] -> f32 [b, o]; a sum, as one column suits no matrix unit."""
  return (
    jnp.sum(features * params['kernel'][None, None, :], axis=-1)
    + params['bias']
  )


def _unless_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
  """Keeps all results but those of gathers: params must not pile up whole."""
  return not primitive.name.startswith('all_gather')


_by_name = jax.checkpoint_policies.save_only_these_names(
  blocked_attention.RESIDUAL
)
# By `ComputeConfig.remat`.
_REMAT_POLICIES: dict[str, Callable[..., Any]] = {
  'layer': jax.checkpoint_policies.nothing_saveable,
  'attention': _by_name,
  'dots': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _by_name
  ),
  'none': _unless_gathered,
}
