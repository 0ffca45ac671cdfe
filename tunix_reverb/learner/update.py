"""One learner step: (state, batch) -> (state, metrics), pure, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any
from typing import NamedTuple
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from tunix_reverb import types
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.ops import losses
from tunix_reverb.sharding import mesh as mesh_lib

if TYPE_CHECKING:  # Flax is imported by who makes the network.
  from tunix_reverb.networks import policy_network

METRIC_NAMES = (
  'loss',
  'pg_loss',
  'baseline_loss',
  'entropy',
  'grad_norm',
  'param_norm',
  'rho_mean',
  'rho_clipped_fraction',
  'c_mean',
  'c_clipped_fraction',
  'ess',
  'behaviour_kl',
  'value_mean',
  'learning_rate',
  'non_finite_updates',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
  """Constants of the loss; `LearnerConfig` explains and validates each."""

  discount_factor: float = 0.99
  rho_bar: float = 1.0
  c_bar: float = 1.0
  vtrace_lambda: float = 1.0
  baseline_cost: float = 0.5
  entropy_cost: float = 0.01
  reward_clip: float = 0.0
  reward_scale: float = 1.0


class LearnerState(NamedTuple):
  """Everything that a resumed learner needs, replicated over the mesh.

  Attributes:
    params: of the network.
    optimiser_state: of the optimiser.
    learner_step: i32 [], updates done, skipped ones included.
    key: uint32 [2], PRNG key; each update leaves a new one behind.
    non_finite_updates: i32 [], updates skipped in a row up to now.
    non_finite_total: i32 [], updates skipped in all.
  """

  params: types.Nest
  optimiser_state: Any
  learner_step: jax.Array
  key: jax.Array
  non_finite_updates: jax.Array
  non_finite_total: jax.Array


Metrics = Mapping[str, jax.Array]
Update = Callable[[LearnerState, types.Batch], tuple[LearnerState, Metrics]]


def init_state(
  network: policy_network.PolicyNetwork,
  optimiser: optimiser_lib.Optimiser,
  mesh: jax.sharding.Mesh,
  *,
  key: jax.Array,
) -> LearnerState:
  """A fresh state on every device of the mesh."""
  sharding = jax.sharding.NamedSharding(mesh, mesh_lib.replicated_spec())
  init = functools.partial(_fresh_state, network, optimiser)
  return jax.jit(init, out_shardings=sharding)(key)


def make_update(
  network: policy_network.PolicyNetwork,
  optimiser: optimiser_lib.Optimiser,
  mesh: jax.sharding.Mesh,
  loss_config: LossConfig,
) -> Update:
  """Compiles to one `shard_map` over the mesh; the state is donated.

  Loss and gradients are means over the transitions of the whole global batch
  whose `loss_mask` is True. An update whose loss or gradient norm is not
  finite leaves params and optimiser state as they were and is counted.

  Args:
    network: the policy network.
    optimiser: built for the same param specs.
    mesh: see `mesh.make_mesh`; a batch has B global rows, a multiple of
      `mesh.num_batch_shards(mesh)`.
    loss_config: constants of the loss.

  Returns:
    A jitted function of (state, batch); metrics are f32 [] by METRIC_NAMES. It
    can be lowered and compiled ahead of time for each bucket.
  """
  gradients = functools.partial(_gradients, network, loss_config)

  # Per-device shapes inside: state whole, batch [B / (data * fsdp), L, ...].
  def update(state, batch):
    grads, loss, sums = gradients(state.params, batch)
    return _apply(optimiser, state, grads, loss, sums)

  sharded = mesh_lib.shard_map(
    update,
    mesh=mesh,
    in_specs=(mesh_lib.replicated_spec(), mesh_lib.batch_spec()),
    out_specs=mesh_lib.replicated_spec(),
  )
  return jax.jit(sharded, donate_argnums=(0,))


def batch_loss_sums(
  network: policy_network.PolicyNetwork,
  loss_config: LossConfig,
  params: types.Nest,
  batch: types.Batch,
) -> losses.LossSums:
  """The loss sums of a batch [B, L], unnormalised."""
  distribution_params, values = network.unroll(
    params,
    batch.observation,
    batch.core_state,
    batch.segment_ids,
    batch.segment_positions,
  )
  rewards = losses.shape_rewards(
    batch.reward,
    reward_clip=loss_config.reward_clip,
    reward_scale=loss_config.reward_scale,
  )
  return losses.vtrace_actor_critic_loss(
    network.distribution.log_prob(distribution_params, batch.action),
    network.distribution.entropy(distribution_params),
    values,
    rewards=rewards,
    discounts=batch.discount,
    behaviour_log_probs=batch.behaviour_log_prob,
    loss_mask=batch.loss_mask,
    segment_ids=batch.segment_ids,
    discount_factor=loss_config.discount_factor,
    rho_bar=loss_config.rho_bar,
    c_bar=loss_config.c_bar,
    vtrace_lambda=loss_config.vtrace_lambda,
  )


def total_loss(
  loss_config: LossConfig, sums: losses.LossSums, count: jax.Array
) -> jax.Array:
  """f32 []; with one device's sums and the global count, its share of it."""
  return (
    sums.pg_loss
    + loss_config.baseline_cost * sums.baseline_loss
    - loss_config.entropy_cost * sums.entropy
  ) / count


def _fresh_state(
  network: policy_network.PolicyNetwork,
  optimiser: optimiser_lib.Optimiser,
  key: jax.Array,
) -> LearnerState:
  init_key, key = jax.random.split(key)
  params = network.init(init_key)
  # Three arrays, not one used thrice: a donated buffer may be used once.
  counter = lambda: jnp.zeros((), jnp.int32)
  return LearnerState(
    params, optimiser.init(params), counter(), key, counter(), counter()
  )


def _gradients(
  network: policy_network.PolicyNetwork,
  loss_config: LossConfig,
  params: types.Nest,
  batch: types.Batch,
) -> tuple[types.Nest, jax.Array, losses.LossSums]:
  """Global gradients, loss and sums; inside `shard_map`."""
  specs = mesh_lib.replicated_spec()

  def loss_share(params):
    sums = batch_loss_sums(network, loss_config, params, batch)
    # No gradient flows into the count. At least 1: a batch without a single
    # transition that counts is a no-op, not 0 / 0.
    count = jax.lax.psum(sums.num_transitions, mesh_lib.BATCH_AXES)
    return total_loss(loss_config, sums, jnp.maximum(count, 1.0)), sums

  grads, sums = jax.grad(loss_share, has_aux=True)(params)
  grads = mesh_lib.psum_over_batch(grads, specs)
  sums = jax.lax.psum(sums, mesh_lib.BATCH_AXES)
  loss = total_loss(loss_config, sums, jnp.maximum(sums.num_transitions, 1.0))
  return grads, loss, sums


def _apply(
  optimiser: optimiser_lib.Optimiser,
  state: LearnerState,
  grads: types.Nest,
  loss: jax.Array,
  sums: losses.LossSums,
) -> tuple[LearnerState, Metrics]:
  """Takes the step, unless something is not finite; inside `shard_map`."""
  specs = mesh_lib.replicated_spec()
  grad_norm = mesh_lib.global_norm(grads, specs)
  is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
  updates, optimiser_state = optimiser.update(
    grads, state.optimiser_state, state.params
  )
  params = optax.apply_updates(state.params, updates)
  # Also skipped: a batch in which nothing counts would decay Adam's moments
  # and move the params on momentum alone.
  take = is_finite & (sums.num_transitions > 0)
  params, optimiser_state = jax.tree_util.tree_map(
    lambda new, old: jnp.where(take, new, old),
    (params, optimiser_state),
    (state.params, state.optimiser_state),
  )
  skipped = (~is_finite).astype(jnp.int32)
  new_state = LearnerState(
    params=params,
    optimiser_state=optimiser_state,
    learner_step=state.learner_step + 1,
    key=jax.random.split(state.key, 1)[0],
    non_finite_updates=skipped * (state.non_finite_updates + 1),
    non_finite_total=state.non_finite_total + skipped,
  )
  metrics = _metrics(loss, sums) | {
    'grad_norm': grad_norm,
    'param_norm': mesh_lib.global_norm(params, specs),
    'learning_rate': optimiser.learning_rate(state.optimiser_state),
    'non_finite_updates': new_state.non_finite_updates.astype(jnp.float32),
  }
  return new_state, metrics


def _metrics(loss: jax.Array, sums: losses.LossSums) -> dict[str, jax.Array]:
  count = jnp.maximum(sums.num_transitions, 1.0)
  return {
    'loss': loss,
    'pg_loss': sums.pg_loss / count,
    'baseline_loss': sums.baseline_loss / count,
    'entropy': sums.entropy / count,
    'rho_mean': sums.rho / count,
    'rho_clipped_fraction': sums.rho_clipped / count,
    'c_mean': sums.c / count,
    'c_clipped_fraction': sums.c_clipped / count,
    # A fraction of the transitions; the offset only matters when all are 0.
    'ess': jnp.square(sums.rho) / (count * sums.rho_squared + 1e-20),
    'behaviour_kl': -sums.log_rho / count,
    'value_mean': sums.value / count,
  }
