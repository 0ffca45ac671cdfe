"""One learner step: (state, batch) -> (state, metrics), pure, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tunix_reverb import types
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.ops import losses
from tunix_reverb.sharding import gradients
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import shards

# Of tokens that the params have sampled themselves, before any update on the
# batch; 0 without such tokens.
MISMATCH_NAMES = ('mismatch_log_prob', 'mismatch_kl_k3', 'mismatch_transitions')
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
  'behaviour_kl_k2',
  'behaviour_kl_k3',
  'ppo_clipped_high_fraction',
  'ppo_clipped_low_fraction',
  'ppo_clipped_dual_fraction',
  'value_mean',
  *MISMATCH_NAMES,
  'learning_rate',
  'non_finite_updates',
)


class LearnerState(NamedTuple):
  """Everything that a resumed learner needs.

  Attributes:
    params: global arrays, split as the objective says.
    optimiser_state: of the optimiser; what it keeps per param is split alike,
      and all else, here and below, is whole on every device.
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


class Sums(NamedTuple):
  """Sums over the whole global batch, the same on every device.

  Attributes:
    accepted: over the transitions that are not rejected.
    count: the loss's denominator: rejected ones count, and it is at least 1.
  """

  accepted: losses.LossSums
  count: jax.Array


Metrics = Mapping[str, jax.Array]
Update = Callable[[LearnerState, types.Batch], tuple[LearnerState, Metrics]]


def abstract_state(
  objective: objectives.Objective,
  optimiser: optimiser_lib.Optimiser,
  mesh: jax.sharding.Mesh,
) -> LearnerState:
  """What `init_state` returns as `jax.ShapeDtypeStruct`, shardings included.

  An update can be lowered for it and a checkpoint restored like it, neither of
  which needs memory for a state that is never used.
  """
  return jax.tree_util.tree_map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    _state_shapes(objective, optimiser),
    shards.shardings(mesh, _state_specs(objective, optimiser)),
  )


def init_state(
  objective: objectives.Objective,
  optimiser: optimiser_lib.Optimiser,
  mesh: jax.sharding.Mesh,
  *,
  key: jax.Array,
  params: types.Nest | None = None,
) -> LearnerState:
  """A state before the first update, in shards, by `objective.param_specs`.

  Args:
    objective: what to optimise.
    optimiser: of its params.
    mesh: where the state goes.
    key: PRNG key.
    params: to begin with, on the mesh; donated. Fresh ones if None.
  """
  shardings = jax.tree_util.tree_map(
    lambda x: x.sharding, abstract_state(objective, optimiser, mesh)
  )
  if params is None:
    init = functools.partial(_fresh_state, objective, optimiser)
    return jax.jit(init, out_shardings=shardings)(key)
  init = functools.partial(_first_state, optimiser)
  return jax.jit(init, out_shardings=shardings, donate_argnums=0)(params, key)


def make_update(
  objective: objectives.Objective,
  optimiser: optimiser_lib.Optimiser,
  mesh: jax.sharding.Mesh,
  *,
  num_micro_batches: int = 1,
  updates_per_batch: int = 1,
) -> Update:
  """Compiles to one `shard_map` over the mesh; the state is donated.

  Loss and gradients are means over the transitions of the whole global batch
  whose `loss_mask` is True; those of them that are rejected count as zeros. An
  update whose loss or gradient norm is not finite leaves params and optimiser
  state as they were, on all devices, and is counted.

  Args:
    objective: what to optimise.
    optimiser: of its params.
    mesh: see `mesh.make_mesh`; a batch has B global rows, a multiple of
      `mesh.num_batch_shards(mesh)`.
    num_micro_batches: divides the rows of a device; only one micro-batch's
      activations exist at a time.
    updates_per_batch: divides them first: optimiser updates on a batch, one
      after the other, each on its rows. All are one learner step, whose metrics
      are their means.

  Returns:
    A jitted function of (state, batch), laid out as `abstract_state` and
    `objective.batch_spec` say; metrics are f32 [] by METRIC_NAMES. It can be
    lowered and compiled ahead of time for each bucket.
  """
  specs = _state_specs(objective, optimiser)

  # Per-device shapes inside: the state in shards, the batch's rows (and, of
  # tokens, positions) of this device.
  def update_once(state, batch):
    grads, loss, sums = mean_gradients(
      objective, state.params, batch, num_micro_batches=num_micro_batches
    )
    return apply_gradients(objective, optimiser, state, grads, loss, sums)

  def update(state, batch):
    if updates_per_batch == 1:
      return update_once(state, batch)
    batches = gradients.split_rows(
      batch, updates_per_batch, 'updates_per_batch'
    )
    if objective.prepare is not None:
      batches = jax.lax.map(
        functools.partial(objective.prepare, state.params), batches
      )
    new_state, metrics = jax.lax.scan(update_once, state, batches)
    skipped = metrics['non_finite_updates'][-1]
    metrics = {
      name: x[0] if name in MISMATCH_NAMES else jnp.mean(x)
      for name, x in metrics.items()
    }
    new_state = new_state._replace(learner_step=state.learner_step + 1)
    return new_state, metrics | {'non_finite_updates': skipped}

  sharded = mesh_lib.shard_map(
    update,
    mesh=mesh,
    in_specs=(specs, objective.batch_spec),
    out_specs=(specs, mesh_lib.replicated_spec()),
  )
  return jax.jit(sharded, donate_argnums=(0,))


def mean_gradients(
  objective: objectives.Objective,
  params: types.Nest,
  batch: types.Batch,
  *,
  num_micro_batches: int = 1,
) -> tuple[types.Nest, jax.Array, Sums]:
  """Gradients of the global loss, the loss, and its sums; in `shard_map`.

  Args:
    objective: what to optimise.
    params: per-device shards.
    batch: of this device.
    num_micro_batches: see `make_update`.

  Returns:
    (gradients, like `params`; loss, f32 []; `Sums` over the mesh).
  """
  # No gradient flows into the count. At least 1: a batch without a single
  # transition that counts is a no-op, not 0 / 0.
  count = jnp.maximum(jax.lax.psum(objective.count(batch), mesh_lib.AXES), 1.0)

  def loss_share(params, rows):
    sums = objective.loss_sums(params, rows)
    return objective.loss_config.total(sums, count), sums

  grads, sums = gradients.accumulate(
    loss_share,
    params,
    batch,
    objective.param_specs,
    num_micro_batches=num_micro_batches,
  )
  sums = mesh_lib.psum_scalars(sums)
  return grads, objective.loss_config.total(sums, count), Sums(sums, count)


def apply_gradients(
  objective: objectives.Objective,
  optimiser: optimiser_lib.Optimiser,
  state: LearnerState,
  grads: types.Nest,
  loss: jax.Array,
  sums: Sums,
) -> tuple[LearnerState, Metrics]:
  """Takes the step, unless something is not finite; inside `shard_map`.

  Args:
    objective: what was differentiated.
    optimiser: of its params.
    state: per-device shards.
    grads: like `state.params`, see `mean_gradients`.
    loss: f32 [].
    sums: of the loss.

  Returns:
    (the next state, metrics).
  """
  specs = objective.param_specs
  grad_norm = mesh_lib.global_norm(grads, specs)
  is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
  updates, optimiser_state = optimiser.update(
    grads, state.optimiser_state, state.params, grad_norm=grad_norm
  )
  params = optax.apply_updates(state.params, updates)
  # Also skipped: a batch in which nothing counts would decay Adam's moments
  # and move the params on momentum alone.
  take = is_finite & (sums.accepted.num_transitions > 0)
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


def _fresh_state(
  objective: objectives.Objective,
  optimiser: optimiser_lib.Optimiser,
  key: jax.Array,
) -> LearnerState:
  init_key, key = jax.random.split(key)
  return _first_state(optimiser, objective.init(init_key), key)


def _first_state(
  optimiser: optimiser_lib.Optimiser, params: types.Nest, key: jax.Array
) -> LearnerState:
  # Three arrays, not one used thrice: a donated buffer may be used once.
  counter = lambda: jnp.zeros((), jnp.int32)
  return LearnerState(
    params, optimiser.init(params), counter(), key, counter(), counter()
  )


def _state_shapes(
  objective: objectives.Objective, optimiser: optimiser_lib.Optimiser
) -> LearnerState:
  return jax.eval_shape(
    functools.partial(_fresh_state, objective, optimiser), jax.random.PRNGKey(0)
  )


def _state_specs(
  objective: objectives.Objective, optimiser: optimiser_lib.Optimiser
) -> LearnerState:
  """`PartitionSpec` of every leaf; what is kept per param lies as the param."""
  state = _state_shapes(objective, optimiser)
  whole = mesh_lib.replicated_spec()
  param_specs = mesh_lib.expand_specs(objective.param_specs, state.params)
  return LearnerState(
    params=param_specs,
    optimiser_state=optax.tree_map_params(
      optimiser.init,
      lambda _, spec: spec,
      state.optimiser_state,
      param_specs,
      transform_non_params=lambda _: whole,
    ),
    learner_step=whole,
    key=whole,
    non_finite_updates=whole,
    non_finite_total=whole,
  )


def _metrics(loss: jax.Array, sums: Sums) -> dict[str, jax.Array]:
  accepted = sums.accepted
  count = jnp.maximum(accepted.num_transitions, 1.0)
  current = jnp.maximum(accepted.num_current, 1.0)
  return {
    'loss': loss,
    'pg_loss': accepted.pg_loss / sums.count,
    'baseline_loss': accepted.baseline_loss / sums.count,
    'entropy': accepted.entropy / count,
    'rho_mean': accepted.rho / count,
    'rho_clipped_fraction': accepted.rho_clipped / count,
    'c_mean': accepted.c / count,
    'c_clipped_fraction': accepted.c_clipped / count,
    # A fraction of the transitions; the offset only matters when all are 0.
    'ess': jnp.square(accepted.rho) / (count * accepted.rho_squared + 1e-20),
    'behaviour_kl': -accepted.log_rho / count,
    'behaviour_kl_k2': accepted.k2 / count,
    'behaviour_kl_k3': accepted.k3 / count,
    'ppo_clipped_high_fraction': accepted.clipped_high / count,
    'ppo_clipped_low_fraction': accepted.clipped_low / count,
    'ppo_clipped_dual_fraction': accepted.clipped_dual / count,
    'value_mean': accepted.value / count,
    'mismatch_log_prob': accepted.mismatch / current,
    'mismatch_kl_k3': accepted.mismatch_k3 / current,
    'mismatch_transitions': accepted.num_current,
  }
