"""The update: the same on any mesh, and safe against bad batches."""

import dataclasses
import functools

from dm_env import specs as dm_specs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.networks import policy_network
from tunix_reverb.sharding import mesh as mesh_lib

_CONFIG = objectives.LossConfig(discount_factor=0.9, vtrace_lambda=0.9)
_ROWS, _LENGTH = 16, 10

_MESHES = {
  '8111': {'data': 8},
  '4211': {'data': 4, 'fsdp': 2},
  '2221': {'data': 2, 'fsdp': 2, 'sequence': 2},
  '2122': {'data': 2, 'sequence': 2, 'tensor': 2},
  '1118': {'data': 1, 'tensor': 8},
}


@functools.cache
def _network(core='none'):
  return policy_network.make_policy_network(
    specs.EnvironmentSpec(
      dm_specs.Array((4,), np.float32),
      dm_specs.DiscreteArray(3),
      dm_specs.Array((), np.float32),
      dm_specs.BoundedArray((), np.float32, 0, 1),
    ),
    hidden_sizes=(8, 8),
    core=core,
    core_size=4,
  )


def _objective(config=_CONFIG):
  return objectives.policy_objective(_network(), config)


def _optimiser(decay_steps=10):
  return optimiser_lib.make_optimiser(
    learning_rate=1e-2,
    learning_rate_end=0.1,
    decay_steps=decay_steps,
    max_grad_norm=0.5,
  )


def _mesh(name=None):
  if name is None:
    return mesh_lib.make_mesh(jax.devices()[:1], data=1)
  return mesh_lib.make_mesh(jax.devices()[:8], **_MESHES[name])


def _batch(seed=0, network=None, **overrides):
  """Rows of two segments and padding; the rows hold different counts."""
  rng = np.random.default_rng(seed)
  shape = (_ROWS, _LENGTH)
  normal = lambda *s: rng.normal(size=s).astype(np.float32)
  ids = np.zeros(shape, np.int32)
  positions = np.zeros(shape, np.int32)
  for b in range(_ROWS):
    first, second = 2 + b % 4, 2 + b // 4
    ids[b, :first], ids[b, first : first + second] = 1, 2
    positions[b, :first] = np.arange(first)
    positions[b, first : first + second] = np.arange(second)
  core_state = jax.tree_util.tree_map(
    lambda s: normal(_ROWS, 2, *s.shape),
    (network or _network()).core_state_spec(),
  )
  batch = types.Batch(
    observation=normal(*shape, 4),
    action=rng.integers(0, 3, size=shape).astype(np.uint8),
    reward=normal(*shape),
    discount=np.ones(shape, np.float32),
    behaviour_log_prob=-1 + 0.2 * normal(*shape),
    policy_version=np.ones(shape, np.int32),
    loss_mask=rng.uniform(size=shape) < 0.8,
    segment_ids=ids,
    segment_positions=positions,
    core_state=core_state,
  )
  return batch._replace(**overrides)


@functools.cache
def _update(mesh_name, config):
  """Compiled once for all tests: compiling is most of their time."""
  return update_lib.make_update(
    _objective(config), _optimiser(), _mesh(mesh_name)
  )


@functools.cache
def _initial_state():
  return jax.device_get(
    update_lib.init_state(
      _objective(), _optimiser(), _mesh(), key=jax.random.PRNGKey(0)
    )
  )


def _run(mesh_name, batches, *, config=_CONFIG):
  """Learner state and metrics after one update per batch, on the host."""
  mesh, update = _mesh(mesh_name), _update(mesh_name, config)
  state = mesh_lib.replicate(_initial_state(), mesh)
  metrics = {}
  for batch in batches:
    state, metrics = update(state, mesh_lib.place_batch(batch, mesh))
  return jax.device_get((state, metrics))


def _assert_close(a, b, **tolerance):
  jax.tree_util.tree_map(
    lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b
  )


def _gradients(mesh, network, batch):
  """Gradients, loss and sums as the update computes them."""
  params = jax.jit(network.init)(jax.random.PRNGKey(0))
  fn = mesh_lib.shard_map(
    functools.partial(
      update_lib.mean_gradients, objectives.policy_objective(network, _CONFIG)
    ),
    mesh=mesh,
    in_specs=(mesh_lib.replicated_spec(), mesh_lib.batch_spec()),
    out_specs=mesh_lib.replicated_spec(),
  )
  return jax.device_get(jax.jit(fn)(params, mesh_lib.place_batch(batch, mesh)))


@pytest.mark.parametrize('name', _MESHES)
def test_gradients_on_eight_devices_equal_one(name):
  network, batch = _network('gru'), _batch(network=_network('gru'))
  _assert_close(
    _gradients(_mesh(name), network, batch),
    _gradients_on_one_device(),
    rtol=2e-5,
    atol=1e-6,
  )


@functools.cache
def _gradients_on_one_device():
  network = _network('gru')
  return _gradients(_mesh(), network, _batch(network=network))


@pytest.mark.parametrize('name', ['8111', '4211'])
def test_updates_on_eight_devices_equal_one(name):
  batches = [_batch(seed) for seed in range(3)]
  ours, our_metrics = _run(name, batches)
  theirs, their_metrics = _run(None, batches)
  # Adam amplifies the last bits of small gradients; hence not tighter.
  _assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
  _assert_close(our_metrics, their_metrics, rtol=1e-3, atol=1e-4)


def test_gradients_are_those_of_the_mean_over_all_transitions():
  """Against one unsharded loss, with the count taken by hand."""
  network, batch = _network(), _batch()
  same = batch.segment_ids[:, :-1] == batch.segment_ids[:, 1:]
  counts = same & (batch.segment_ids[:, :-1] > 0) & batch.loss_mask[:, :-1]
  params = jax.jit(network.init)(jax.random.PRNGKey(0))

  def loss(params):
    sums = objectives.batch_loss_sums(network, _CONFIG, params, batch)
    return (
      sums.pg_loss + 0.5 * sums.baseline_loss - 0.01 * sums.entropy
    ) / np.float32(counts.sum())

  expected_loss, expected = jax.jit(jax.value_and_grad(loss))(params)
  gradients, actual_loss, _ = _gradients(_mesh('8111'), network, batch)
  _assert_close(gradients, expected, rtol=2e-5, atol=1e-6)
  np.testing.assert_allclose(actual_loss, expected_loss, rtol=1e-5)


def test_metric_names_are_frozen():
  state, metrics = _run(None, [_batch()])
  assert (
    set(metrics)
    == set(update_lib.METRIC_NAMES)
    == {
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
      'mismatch_log_prob',
      'mismatch_kl_k3',
      'mismatch_transitions',
      'ppo_clipped_high_fraction',
      'ppo_clipped_low_fraction',
      'ppo_clipped_dual_fraction',
      'value_mean',
      'learning_rate',
      'non_finite_updates',
    }
  )
  for name, value in metrics.items():
    assert value.shape == () and value.dtype == np.float32, name
    assert np.isfinite(value), name
  assert 0 < metrics['ess'] <= 1
  assert state.learner_step == 1 and state.learner_step.dtype == np.int32


def test_behaviour_kl_cost_holds_the_policy_by_the_one_that_acted():
  nothing_else = {'baseline_cost': 0.0, 'entropy_cost': 0.0}
  batch = _batch(reward=np.zeros((_ROWS, _LENGTH), np.float32))
  distances = {}
  for cost in (0.0, 10.0):
    config = dataclasses.replace(
      _CONFIG, behaviour_kl_cost=cost, **nothing_else
    )
    _, one = _run(None, [batch], config=config)
    np.testing.assert_allclose(
      one['loss'], one['pg_loss'] + cost * one['behaviour_kl_k2'], rtol=1e-5
    )
    _, many = _run(None, [batch] * 10, config=config)
    distances[cost] = many['behaviour_kl_k2'] / one['behaviour_kl_k2']
  assert distances[10.0] < 0.9 < distances[0.0]


def test_learning_rate_falls_linearly_and_stays():
  rates = []
  for n in (1, 6, 13):
    _, metrics = _run(None, [_batch()] * n)
    rates.append(metrics['learning_rate'])
  np.testing.assert_allclose(rates, [1e-2, 5.5e-3, 1e-3], rtol=1e-5)


def test_clip_bounds_the_global_norm():
  transform = optimiser_lib.clip_by_global_norm(0.5)
  for scale, expected in ((1e-3, 5e-3), (1e3, 0.5)):
    gradients = {
      'a': np.full(9, scale, np.float32),
      'b': np.full(16, scale, np.float32),
    }
    norm = lambda x: mesh_lib.global_norm(x, mesh_lib.replicated_spec())
    clipped, _ = transform.update(gradients, (), grad_norm=norm(gradients))
    np.testing.assert_allclose(norm(clipped), expected, rtol=1e-5)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('mesh', [None, '8111'])
def test_non_finite_update_is_skipped_and_counted(bad, mesh):
  """One bad reward on one device: no device takes the step."""
  good = _batch()
  reward = good.reward.copy()
  reward[3, 0] = bad
  mask = np.ones_like(good.loss_mask)
  broken = good._replace(reward=reward, loss_mask=mask)
  before, _ = _run(mesh, [good])
  state, metrics = _run(mesh, [good, broken, broken])
  _assert_equal(state.params, before.params)
  _assert_equal(state.optimiser_state, before.optimiser_state)
  assert state.learner_step == 3
  assert state.non_finite_updates == state.non_finite_total == 2
  assert metrics['non_finite_updates'] == 2
  state, metrics = _run(mesh, [good, broken, broken, good])
  assert state.non_finite_updates == 0 and state.non_finite_total == 2
  assert metrics['non_finite_updates'] == 0
  with np.testing.assert_raises(AssertionError):
    _assert_equal(state.params, before.params)


def _assert_equal(a, b):
  jax.tree_util.tree_map(np.testing.assert_array_equal, a, b)


def test_reward_clip():
  config = objectives.LossConfig(reward_clip=0.5)
  batch = _batch()
  clipped = batch._replace(reward=np.clip(batch.reward, -0.5, 0.5))
  _assert_equal(
    _run(None, [batch], config=config), _run(None, [clipped], config=config)
  )


def test_padding_contributes_nothing():
  """Padding rows, and whatever the padding of a row holds."""
  batch = _batch()
  padding = batch.segment_ids == 0
  rng = np.random.default_rng(7)

  def scribble(x):
    mask = padding.reshape(padding.shape + (1,) * (x.ndim - 2))
    noise = rng.integers(0, 50, size=x.shape).astype(x.dtype)
    return np.where(mask, noise, x)

  scribbled = batch._replace(
    **{
      k: scribble(getattr(batch, k))
      for k in (
        'observation',
        'action',
        'reward',
        'discount',
        'behaviour_log_prob',
      )
    }
  )
  expected = _run(None, [batch])
  _assert_close(_run(None, [scribbled]), expected, rtol=1e-5, atol=1e-7)
  longer = jax.tree_util.tree_map(
    lambda x: np.concatenate([x, np.zeros_like(x)]), batch
  )
  _assert_close(_run(None, [longer]), expected, rtol=1e-4, atol=1e-5)


def test_what_is_rejected_counts_in_the_denominator_only():
  """Half the gradient when half of the transitions are rejected."""
  batch = _batch(loss_mask=np.ones((_ROWS, _LENGTH), bool))
  twice = jax.tree_util.tree_map(
    lambda x: np.concatenate([x, x + np.ones_like(x)]), batch
  )
  twice = twice._replace(
    segment_ids=np.tile(batch.segment_ids, (2, 1)),
    segment_positions=np.tile(batch.segment_positions, (2, 1)),
    is_rejected=np.arange(2 * _ROWS)[:, None].repeat(_LENGTH, 1) >= _ROWS,
  )
  network = _network()
  for name in (None, '2122'):
    whole, loss, sums = _gradients(_mesh(name), network, batch)
    half, half_loss, half_sums = _gradients(_mesh(name), network, twice)
    _assert_close(
      half, jax.tree_util.tree_map(lambda g: g / 2, whole), rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(2 * half_loss, loss, rtol=1e-6)
    assert half_sums.count == 2 * sums.count
    assert half_sums.accepted.num_transitions == sums.count


def test_truncation_bootstraps_and_leaks_nothing():
  """Scaling a truncated segment's neighbour must not move its gradient."""
  network = _network()
  batch = _batch(loss_mask=np.ones((_ROWS, _LENGTH), bool))
  first = batch.segment_ids == 1
  loud = batch._replace(
    reward=np.where(first, batch.reward, 100).astype(np.float32),
    loss_mask=first,
  )
  quiet = batch._replace(loss_mask=first)
  _assert_equal(_run(None, [loud]), _run(None, [quiet]))
  params = jax.jit(network.init)(jax.random.PRNGKey(0))
  sums = lambda b: objectives.batch_loss_sums(network, _CONFIG, params, b)
  terminated = quiet._replace(discount=np.zeros_like(batch.discount))
  assert sums(terminated).baseline_loss != sums(quiet).baseline_loss


@pytest.mark.parametrize('mesh', [None, '4211'])
def test_batch_without_anything_to_learn_is_a_no_op(mesh):
  empty = _batch(loss_mask=np.zeros((_ROWS, _LENGTH), bool))
  padding = _batch(segment_ids=np.zeros((_ROWS, _LENGTH), np.int32))
  before, _ = _run(mesh, [_batch()])
  for batch in (empty, padding):
    state, metrics = _run(mesh, [_batch(), batch])
    _assert_equal(state.params, before.params)
    _assert_equal(state.optimiser_state, before.optimiser_state)
    assert all(np.isfinite(v) for v in metrics.values())
    assert metrics['loss'] == 0 and state.non_finite_total == 0


def test_update_compiles_ahead_and_donates():
  objective, optimiser, mesh = _objective(), _optimiser(), _mesh('8111')
  update = update_lib.make_update(objective, optimiser, mesh)
  batch = mesh_lib.place_batch(_batch(), mesh)
  compiled = update.lower(
    update_lib.abstract_state(objective, optimiser, mesh), batch
  ).compile()
  state = update_lib.init_state(
    objective, optimiser, mesh, key=jax.random.PRNGKey(0)
  )
  old = jax.tree_util.tree_leaves(state.params)[0]
  for _ in range(2):
    state, _ = compiled(state, batch)
  assert old.is_deleted()
  assert state.learner_step == 2


def test_key_is_never_reused():
  keys = {tuple(_run(None, [_batch()] * n)[0].key.tolist()) for n in range(4)}
  assert len(keys) == 4


def test_learns_a_bandit():
  """Action 1 pays; on-policy batches sampled from the current params."""
  objective, optimiser, mesh = _objective(), _optimiser(1000), _mesh()
  update = update_lib.make_update(objective, optimiser, mesh)
  state = update_lib.init_state(
    objective, optimiser, mesh, key=jax.random.PRNGKey(1)
  )
  network = _network()
  shape = (_ROWS, _LENGTH)
  ids = np.repeat(np.arange(1, 6, dtype=np.int32), 2)[None].repeat(_ROWS, 0)
  positions = np.tile(np.arange(2, dtype=np.int32), (_ROWS, 5))
  observation = np.ones((*shape, 4), np.float32)

  @jax.jit
  def act(params, key):
    logits, _ = network.unroll(params, observation, (), ids, positions)
    action = network.distribution.sample(logits, key=key)
    return action, network.distribution.log_prob(logits, action)

  for i in range(60):
    action, log_prob = act(state.params, jax.random.PRNGKey(i))
    batch = types.Batch(
      observation,
      action,
      (action == 1).astype(jnp.float32),
      np.zeros(shape, np.float32),
      log_prob,
      np.ones(shape, np.int32),
      np.ones(shape, bool),
      ids,
      positions,
      (),
    )
    state, _ = update(state, mesh_lib.place_batch(batch, mesh))
  action, _ = act(state.params, jax.random.PRNGKey(99))
  assert np.mean(np.asarray(action) == 1) > 0.9
