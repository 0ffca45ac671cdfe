"""Log-probs and entropy of tokens, from a vocabulary split over devices.

The logits of all tokens, [T, V] in float32, would be the largest array of a
training step (8 GiB for 16,384 tokens of Llama 3). Here a block of tokens is
shared among the devices along one mesh axis, each computes the logits of its
part of the vocabulary, and sums over the vocabulary are reduce-scattered back,
so that every device ends up with the results of its own tokens and nothing is
computed twice. The backward pass computes the logits of each of several blocks
again; those of a single block it would need at once.

Letters: T tokens of this device, c of them in a block, t devices along the
axis, V vocabulary, D features.
"""

from __future__ import annotations

from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from tunix_reverb.sharding import mesh as mesh_lib

_recompute: Any = jax.checkpoint  # type: ignore[attr-defined]


class TokenLogProbs(NamedTuple):
  """Of each token of this device.

  Attributes:
    log_prob: f32 [T], of the target; 0 where the target is out of range, as it
      may be on padding.
    entropy: f32 [T], nats.
  """

  log_prob: jax.Array
  entropy: jax.Array


def token_log_probs(
  features: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  *,
  axis: str,
  block: int,
  precision: str = 'highest',
) -> TokenLogProbs:
  """Log-softmax of features @ head.T at `targets`; inside `shard_map`.

  Args:
    features: f32 [T, D], of this device's tokens; other devices along `axis`
      hold other tokens.
    head: f32 [V / t, D], this device's part of the vocabulary: tokens from
      axis_index * V / t.
    targets: i32 [T].
    axis: the mesh axis over which tokens and vocabulary are split.
    block: c, at most this many of a device's tokens at a time; logits take
      4 * c * V bytes.
    precision: of the matrix products, see `jax.lax.Precision`.

  Returns:
    `TokenLogProbs`.
  """
  chex.assert_rank([features, head], 2)
  chex.assert_rank(targets, 1)
  chex.assert_type([features, head], jnp.float32)

  num_tokens = features.shape[0]
  block = min(block, num_tokens)
  num_blocks = -(-num_tokens // block)
  pad = num_blocks * block - num_tokens
  features = jnp.pad(features, ((0, pad), (0, 0)))
  targets = jnp.pad(targets, (0, pad))

  def block_fn(
    features: jax.Array, head: jax.Array, targets: jax.Array
  ) -> TokenLogProbs:
    return _block_log_probs(
      features, head, targets, axis=axis, precision=precision
    )

  if num_blocks == 1:
    return block_fn(features, head, targets)
  # Nothing of a block is kept but its inputs.
  recomputed = _recompute(block_fn)
  _, outputs = jax.lax.scan(
    lambda _, x: ((), recomputed(x[0], head, x[1])),
    (),
    (
      features.reshape(num_blocks, block, -1),
      targets.reshape(num_blocks, block),
    ),
  )
  return jax.tree_util.tree_map(
    lambda x: x.reshape(num_blocks * block)[:num_tokens], outputs
  )


def _block_log_probs(
  features: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  *,
  axis: str,
  precision: str,
) -> TokenLogProbs:
  """One block: features f32 [c, D], targets i32 [c]."""
  part_size = head.shape[0]
  num_parts = jax.lax.psum(1, axis)
  part_start = jax.lax.axis_index(axis) * jnp.int32(part_size)
  # All devices' tokens: [t, c, D] and [t, c].
  own = targets
  features = mesh_lib.all_gather(features[None], axis, dim=0)
  targets = mesh_lib.all_gather(targets[None], axis, dim=0)
  logits = jnp.einsum('tcd,vd->tcv', features, head, precision=precision)

  # The maximum only keeps `exp` in range; nothing depends on which one it is,
  # and `pmax` has no derivative.
  maximum = jax.lax.pmax(
    jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)), axis
  )
  logits = logits - maximum
  weights = jnp.exp(logits)
  # A comparison, not a gather: its gradient is one fused kernel instead of a
  # scatter, and a target of another part is harmless.
  index = (targets - part_start)[..., None]
  is_target = index == jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)

  # [t, c, V / t] -> this device's [c], summed over the whole vocabulary.
  parts = (weights, weights * logits, jnp.where(is_target, logits, 0.0))
  sums = jnp.stack([jnp.sum(x, axis=-1) for x in parts])  # [3, t, c]
  normaliser, weighted, target_logit = (
    sums[:, 0]
    if num_parts == 1
    else jax.lax.psum_scatter(sums, axis, scatter_dimension=1)
  )
  log_normaliser = jnp.log(normaliser)
  mean_logit = weighted * jnp.exp(-log_normaliser)
  in_range = (own >= 0) & (own < part_size * num_parts)
  return TokenLogProbs(
    jnp.where(in_range, target_logit - log_normaliser, 0.0),
    log_normaliser - mean_logit,
  )
