"""What an update optimises: params, how batches are laid out, and the loss.

An `Objective` is made for a policy network, whose params are whole on every
device, or for a transformer, whose params are in shards. Its functions run
inside the `shard_map` that the update opens. Each device returns its share of
every sum, such that the shares of all devices of the mesh add up to the sum
over the batch.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from tunix_reverb import types
from tunix_reverb.ops import losses
from tunix_reverb.ops import policy_loss as policy_loss_lib
from tunix_reverb.ops import recurrence
from tunix_reverb.ops import token_loss
from tunix_reverb.ops import vtrace
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import positions

if TYPE_CHECKING:  # Flax is imported by who makes the network.
  from tunix_reverb.networks import policy_network
  from tunix_reverb.networks.transformer import model as model_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
  """Constants of the loss; `LearnerConfig` explains and validates each."""

  discount_factor: float = 0.99
  rho_bar: float = 1.0
  c_bar: float = 1.0
  vtrace_lambda: float = 1.0
  baseline_cost: float = 0.5
  entropy_cost: float = 0.01
  behaviour_kl_cost: float = 0.0
  reward_clip: float = 0.0
  reward_scale: float = 1.0

  def shape_rewards(self, rewards: jax.Array) -> jax.Array:
    """Rewards as the loss sees them, of any shape."""
    return losses.shape_rewards(
      rewards, reward_clip=self.reward_clip, reward_scale=self.reward_scale
    )

  def total(self, sums: losses.LossSums, count: jax.Array) -> jax.Array:
    """The loss, f32 []; of one device's sums its share of the loss.

    Args:
      sums: of the loss.
      count: of the whole global batch.
    """
    total = (
      sums.pg_loss
      + self.baseline_cost * sums.baseline_loss
      - self.entropy_cost * sums.entropy
    )
    # Not a product with 0: an infinite log ratio would make that NaN.
    if self.behaviour_kl_cost:
      total = total + self.behaviour_kl_cost * sums.k2
    return total / count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """What an update is made for.

  Attributes:
    param_specs: nest of `PartitionSpec` like the params, or one for all.
    batch_spec: of every leaf of a batch.
    init: PRNG key -> fresh params, of global shape; not inside `shard_map`.
    count: batch -> this device's share of the number of transitions that count
      in the loss, rejected ones included, f32 []: its denominator.
    loss_sums: (params, batch) -> this device's share of the sums over those
      that are not rejected.
    loss_config: constants of the loss.
    prepare: (params, batch) -> the batch with what the params say of it before
      the first of several updates on it; None if the loss asks for nothing.
  """

  param_specs: types.Nest
  batch_spec: mesh_lib.PartitionSpec
  init: Callable[[jax.Array], types.Nest]
  count: Callable[[types.Batch], jax.Array]
  loss_sums: Callable[[types.Nest, types.Batch], losses.LossSums]
  loss_config: LossConfig
  prepare: Callable[[types.Nest, types.Batch], types.Batch] | None = None


def policy_objective(
  network: policy_network.PolicyNetwork, loss_config: LossConfig
) -> Objective:
  """The actor-critic loss of a policy network, its params whole everywhere.

  Devices along `sequence` and `tensor` repeat each other's work.

  Args:
    network: the policy network.
    loss_config: constants of the loss.
  """
  repeated_over = (mesh_lib.SEQUENCE, mesh_lib.TENSOR)

  def count(batch: types.Batch) -> jax.Array:
    return _share(_count(batch, recurrence.WHOLE), repeated_over)

  def loss_sums(params: types.Nest, batch: types.Batch) -> losses.LossSums:
    sums = batch_loss_sums(network, loss_config, params, batch)
    return _share(sums, repeated_over)

  return Objective(
    param_specs=mesh_lib.replicated_spec(),
    batch_spec=mesh_lib.batch_spec(),
    init=network.init,
    count=count,
    loss_sums=loss_sums,
    loss_config=loss_config,
  )


def batch_loss_sums(
  network: policy_network.PolicyNetwork,
  loss_config: LossConfig,
  params: types.Nest,
  batch: types.Batch,
) -> losses.LossSums:
  """The loss sums of a batch [B, L] of whole rows; needs no mesh."""
  distribution_params, values = network.unroll(
    params,
    batch.observation,
    batch.core_state,
    batch.segment_ids,
    batch.segment_positions,
  )
  return losses.vtrace_actor_critic_loss(
    network.distribution.log_prob(distribution_params, batch.action),
    network.distribution.entropy(distribution_params),
    values,
    rewards=loss_config.shape_rewards(batch.reward),
    discounts=batch.discount,
    behaviour_log_probs=batch.behaviour_log_prob,
    loss_mask=_accepted(batch),
    segment_ids=batch.segment_ids,
    discount_factor=loss_config.discount_factor,
    rho_bar=loss_config.rho_bar,
    c_bar=loss_config.c_bar,
    vtrace_lambda=loss_config.vtrace_lambda,
  )


def token_objective(
  model: model_lib.Transformer,
  loss_config: LossConfig,
  *,
  ratio: token_loss.Ratio = 'token',
  policy_loss: policy_loss_lib.PolicyLoss = policy_loss_lib.VTRACE,
) -> Objective:
  """The token loss of a transformer, params and rows split over its mesh.

  Of a batch, `observation` holds the tokens and `action` the next ones, both
  of any integer dtype; L must be a multiple of the devices along `sequence`
  times those along `tensor`.

  Args:
    model: built for the mesh of the update.
    loss_config: constants of the loss.
    ratio: see `token_loss.TokenLoss`; per turn, batches need `turn_id`.
    policy_loss: which loss. Where a batch has `advantage`, that is what the
      policy is moved by, and no values are learnt.
  """
  is_split = model.mesh.shape[mesh_lib.SEQUENCE] > 1
  rows = recurrence.Rows(axis_name=mesh_lib.SEQUENCE if is_split else None)
  loss = token_loss.TokenLoss(
    discount_factor=loss_config.discount_factor,
    rho_bar=loss_config.rho_bar,
    c_bar=loss_config.c_bar,
    vtrace_lambda=loss_config.vtrace_lambda,
    policy=policy_loss,
    ratio=ratio,
    rows=rows,
  )

  def count(batch: types.Batch) -> jax.Array:
    return _share(_count(batch, rows), (mesh_lib.TENSOR,))

  # Per-device shapes inside: batch [b, L / sequence], see `positions`.
  apply = functools.partial(_apply, model)

  def prepare(params: types.Nest, batch: types.Batch) -> types.Batch:
    log_probs = positions.shard_from_own(apply(params, batch).log_prob)
    return batch._replace(proximal_log_prob=log_probs)

  def loss_sums(params: types.Nest, batch: types.Batch) -> losses.LossSums:
    outputs = apply(params, batch)
    # The traces of V-trace go along whole parts of a row, so devices along
    # `tensor` exchange three numbers per token and all take the same sums.
    log_probs, entropies, values = jnp.moveaxis(
      positions.shard_from_own(jnp.stack(outputs, axis=-1)), -1, 0
    )
    sums = loss.sums(
      log_probs,
      entropies,
      values,
      rewards=loss_config.shape_rewards(batch.reward),
      discounts=batch.discount,
      behaviour_log_probs=batch.behaviour_log_prob,
      loss_mask=_accepted(batch),
      segment_ids=batch.segment_ids,
      turn_ids=_present(batch.turn_id),
      advantages=_present(batch.advantage),
      proximal_log_probs=_present(batch.proximal_log_prob),
      is_current=_present(batch.is_current),
    )
    return _share(sums, (mesh_lib.TENSOR,))

  return Objective(
    param_specs=model.param_specs,
    batch_spec=mesh_lib.token_spec(),
    init=model.init,
    count=count,
    loss_sums=loss_sums,
    loss_config=loss_config,
    prepare=prepare if policy_loss.kind == 'ppo' else None,
  )


def _apply(
  model: model_lib.Transformer, params: types.Nest, batch: types.Batch
) -> model_lib.TokenOutputs:
  return model.apply(
    params,
    batch.observation.astype(jnp.int32),
    batch.action.astype(jnp.int32),
    batch.segment_ids,
    batch.segment_positions,
  )


def _present(column: Any) -> jax.Array | None:
  """None for a column that the batch is without."""
  return None if isinstance(column, tuple) else column


def _accepted(batch: types.Batch) -> jax.Array:
  if isinstance(batch.is_rejected, tuple):
    return batch.loss_mask
  return batch.loss_mask & ~batch.is_rejected


def _count(batch: types.Batch, rows: recurrence.Rows) -> jax.Array:
  is_transition = vtrace.transition_mask(batch.segment_ids, rows)
  return jnp.sum((batch.loss_mask & is_transition).astype(jnp.float32))


def _share(sums: types.Nest, repeated_over: tuple[str, ...]) -> types.Nest:
  """A device's share of sums that all devices along some axes have alike."""
  repeats = mesh_lib.num_devices_along(repeated_over)
  if repeats == 1:
    return sums
  return jax.tree_util.tree_map(lambda x: x / repeats, sums)
