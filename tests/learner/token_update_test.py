"""The update of a transformer: the same on any mesh, in shards throughout."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb import types
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.networks.transformer import config as transformer_config
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.ops import policy_loss
from tunix_reverb.ops import token_loss
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import shards

_MODEL = transformer_config.TransformerConfig(
  vocabulary_size=48,
  num_layers=2,
  model_size=32,
  mlp_size=40,
  num_heads=8,
  num_kv_heads=8,
  head_size=4,
)
_COMPUTE = transformer_config.ComputeConfig(
  dtype='float32', attention='blocked', attention_block=8, head_block=8
)
_LOSS = objectives.LossConfig(
  discount_factor=0.97,
  rho_bar=1.1,
  c_bar=0.9,
  vtrace_lambda=0.9,
  entropy_cost=0.05,
  reward_scale=0.5,
)
_ROWS, _LENGTH = 8, 16
_ONE = (1, 1, 1, 1)
_MAX_NORM = 0.05
# (data, fsdp, sequence, tensor), ratio, micro-batches.
_MESHES = [
  ((1, 2, 2, 2), 'turn', 2),
  ((4, 1, 1, 2), 'token', 1),
  pytest.param((8, 1, 1, 1), 'token', 1, marks=pytest.mark.slow),
  pytest.param((1, 8, 1, 1), 'turn', 1, marks=pytest.mark.slow),
  pytest.param((1, 1, 8, 1), 'turn', 4, marks=pytest.mark.slow),
  pytest.param((1, 1, 1, 8), 'turn_geometric', 8, marks=pytest.mark.slow),
  pytest.param((2, 2, 2, 1), 'turn_geometric', 2, marks=pytest.mark.slow),
  pytest.param((2, 1, 2, 2), 'turn', 1, marks=pytest.mark.slow),
]


@functools.cache
def _objective(sizes, ratio='token', kind='vtrace'):
  data, fsdp, sequence, tensor = sizes
  mesh = mesh_lib.make_mesh(
    jax.devices()[: data * fsdp * sequence * tensor],
    data=data,
    fsdp=fsdp,
    sequence=sequence,
    tensor=tensor,
  )
  model = model_lib.make_transformer(_MODEL, mesh, _COMPUTE)
  objective = objectives.token_objective(
    model,
    _LOSS,
    ratio=ratio,
    policy_loss=policy_loss.PolicyLoss(kind=kind, ppo_clip_low=0.02),
  )
  return mesh, model, objective


@functools.cache
def _optimiser():
  return optimiser_lib.make_optimiser(
    learning_rate=1e-3,
    learning_rate_end=1.0,
    decay_steps=10,
    max_grad_norm=_MAX_NORM,
  )


@functools.cache
def _params():
  """Away from the nearly uniform first policy, or nothing would be tested."""
  rng = np.random.default_rng(1)
  _, _, objective = _objective(_ONE)
  return jax.tree_util.tree_map(
    lambda x: np.asarray(x) + 0.1 * rng.normal(size=x.shape).astype(np.float32),
    objective.init(jax.random.PRNGKey(0)),
  )


def _batch(seed=0, **overrides):
  """Two or three segments a row, of turns and tool output, and padding."""
  rng = np.random.default_rng(seed)
  shape = (_ROWS, _LENGTH)
  normal = lambda: rng.normal(size=shape).astype(np.float32)
  ids = np.zeros(shape, np.int32)
  places = np.zeros(shape, np.int32)
  for b in range(_ROWS):
    ends = [0, 3 + b % 4, 9 + b % 3, *([_LENGTH - 2] if b % 2 else [])]
    for segment, (start, end) in enumerate(itertools.pairwise(ends), 1):
      ids[b, start:end] = segment
      places[b, start:end] = np.arange(end - start)
  token = lambda: rng.integers(0, 48, shape).astype(np.uint16)
  batch = types.Batch(
    observation=token(),
    action=token(),
    reward=normal(),
    discount=np.ones(shape, np.float32),
    behaviour_log_prob=-3.0 + 0.3 * normal(),
    policy_version=np.ones(shape, np.int32),
    loss_mask=rng.random(shape) < 0.7,
    segment_ids=ids,
    segment_positions=places,
    core_state=(),
    turn_id=(np.arange(_LENGTH)[None] // rng.integers(2, 5, (_ROWS, 1))).astype(
      np.int32
    ),
    is_rejected=rng.random(shape) < 0.1,
    is_current=rng.random(shape) < 0.5,
  )
  return batch._replace(**overrides)


def _place(batch, sizes):
  mesh, _, objective = _objective(sizes)
  return mesh_lib.place_batch(batch, mesh, objective.batch_spec)


def _gradients(sizes, ratio, batch, num_micro_batches=1):
  """Gradients, loss and sums as the update computes them, on the host."""
  mesh, _, objective = _objective(sizes, ratio)
  whole = mesh_lib.replicated_spec()
  fn = mesh_lib.shard_map(
    functools.partial(
      update_lib.mean_gradients, objective, num_micro_batches=num_micro_batches
    ),
    mesh=mesh,
    in_specs=(objective.param_specs, objective.batch_spec),
    out_specs=(objective.param_specs, whole, whole),
  )
  params = jax.device_put(
    _params(), shards.shardings(mesh, objective.param_specs)
  )
  return jax.device_get(jax.jit(fn)(params, _place(batch, sizes)))


@functools.cache
def _gradients_on_one_device(ratio):
  return _gradients(_ONE, ratio, _batch())


def _relative_errors(actual, expected):
  leaves, _ = jax.tree_util.tree_flatten_with_path(expected)
  return {
    jax.tree_util.keystr(path): float(np.linalg.norm(a - e) / np.linalg.norm(e))
    for (path, e), a in zip(leaves, jax.tree_util.tree_leaves(actual))
  }


@pytest.mark.parametrize('sizes,ratio,num_micro_batches', _MESHES)
def test_gradients_on_eight_devices_equal_one(sizes, ratio, num_micro_batches):
  gradients, loss, sums = _gradients(sizes, ratio, _batch(), num_micro_batches)
  expected = _gradients_on_one_device(ratio)
  np.testing.assert_allclose(loss, expected[1], rtol=1e-5)
  errors = _relative_errors(gradients, expected[0])
  assert max(errors.values()) < 1e-5, errors
  for actual, one in zip(
    jax.tree_util.tree_leaves(sums), jax.tree_util.tree_leaves(expected[2])
  ):
    np.testing.assert_allclose(actual, one, rtol=1e-5)


def test_gradients_are_those_of_the_mean_over_the_policys_tokens():
  """Against model and loss put together by hand, the count taken by hand."""
  batch = _batch()
  mesh, model, _ = _objective(_ONE)
  ids = batch.segment_ids
  is_transition = np.pad(ids[:, :-1] == ids[:, 1:], ((0, 0), (0, 1)))
  count = (batch.loss_mask & is_transition & (ids > 0)).sum()
  assert count > 20 and (batch.is_rejected & batch.loss_mask).any()
  apply = mesh_lib.shard_map(
    model.apply,
    mesh=mesh,
    in_specs=(model.param_specs,) + (mesh_lib.token_spec(),) * 4,
    out_specs=mesh_lib.position_spec(),
  )

  def loss(params):
    outputs = apply(
      params,
      jnp.asarray(batch.observation, jnp.int32),
      jnp.asarray(batch.action, jnp.int32),
      ids,
      batch.segment_positions,
    )
    sums = token_loss.TokenLoss(
      ratio='turn',
      discount_factor=0.97,
      rho_bar=1.1,
      c_bar=0.9,
      vtrace_lambda=0.9,
    ).sums(
      *outputs,
      rewards=0.5 * batch.reward,
      discounts=batch.discount,
      behaviour_log_probs=batch.behaviour_log_prob,
      loss_mask=batch.loss_mask & ~batch.is_rejected,
      segment_ids=ids,
      turn_ids=batch.turn_id,
    )
    total = sums.pg_loss + 0.5 * sums.baseline_loss - 0.05 * sums.entropy
    return total / np.float32(count)

  expected_loss, expected = jax.jit(jax.value_and_grad(loss))(_params())
  gradients, actual_loss, _ = _gradients_on_one_device('turn')
  np.testing.assert_allclose(actual_loss, expected_loss, rtol=1e-5)
  errors = _relative_errors(gradients, expected)
  assert max(errors.values()) < 1e-5, errors


def test_packed_rows_equal_one_segment_per_row():
  batch = _batch()
  rows = []
  for b in range(_ROWS):
    for segment in range(1, int(batch.segment_ids[b].max()) + 1):
      chosen = batch.segment_ids[b] == segment
      row = [
        np.pad(x[b][chosen], (0, (~chosen).sum()))
        for x in jax.tree_util.tree_leaves(batch)
      ]
      rows.append(row)
  # Rows of padding, so that they divide over the mesh.
  rows += [[np.zeros_like(x) for x in rows[0]]] * (-len(rows) % 4)
  treedef = jax.tree_util.tree_structure(batch)
  alone = treedef.unflatten([np.stack(x) for x in zip(*rows)])
  alone = alone._replace(segment_ids=np.minimum(alone.segment_ids, 1))
  gradients, loss, _ = _gradients((2, 2, 1, 1), 'turn', alone)
  expected = _gradients_on_one_device('turn')
  np.testing.assert_allclose(loss, expected[1], rtol=1e-5)
  errors = _relative_errors(gradients, expected[0])
  assert max(errors.values()) < 1e-5, errors


@functools.cache
def _update(sizes):
  """Compiled once for all tests, ahead of any state."""
  mesh, _, objective = _objective(sizes)
  update = update_lib.make_update(objective, _optimiser(), mesh)
  shapes = update_lib.abstract_state(objective, _optimiser(), mesh)
  return update.lower(shapes, _place(_batch(), sizes)).compile(), shapes


def _state(sizes):
  """A fresh state with `_params` on the mesh."""
  mesh, _, objective = _objective(sizes)
  state = update_lib.init_state(
    objective, _optimiser(), mesh, key=jax.random.PRNGKey(0)
  )
  return state._replace(
    params=jax.device_put(
      _params(), shards.shardings(mesh, objective.param_specs)
    )
  )


_SHARDED = (1, 2, 2, 2)


def test_the_state_is_made_in_shards_and_stays_so():
  compiled, shapes = _update(_SHARDED)
  mesh, _, objective = _objective(_SHARDED)
  fresh = update_lib.init_state(
    objective, _optimiser(), mesh, key=jax.random.PRNGKey(0)
  )
  state, _ = compiled(_state(_SHARDED), _place(_batch(), _SHARDED))
  for made in (fresh, state):
    for x, shape in zip(
      jax.tree_util.tree_leaves(made), jax.tree_util.tree_leaves(shapes)
    ):
      assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
      assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)
  adam = state.optimiser_state[1]
  for tree in (state.params, adam.mu, adam.nu):
    query = tree['layers']['query']
    assert query.shape == (2, 32, 32)
    assert {s.data.shape for s in query.addressable_shards} == {(2, 8, 16)}


def test_the_state_is_donated_and_nothing_recompiles():
  mesh, _, objective = _objective(_SHARDED)
  update = update_lib.make_update(objective, _optimiser(), mesh)
  state = _state(_SHARDED)
  for seed in range(3):
    old = jax.tree_util.tree_leaves((state.params, state.optimiser_state))
    state, _ = update(state, _place(_batch(seed), _SHARDED))
    assert all(x.is_deleted() for x in old)
  assert update._cache_size() == 1


def test_the_clip_sees_the_norm_of_all_shards():
  """Adam's first moment after one update is a tenth of what it was given."""
  moments = {}
  for sizes in (_ONE, _SHARDED):
    compiled, _ = _update(sizes)
    state, metrics = compiled(_state(sizes), _place(_batch(), sizes))
    assert metrics['grad_norm'] > 4 * _MAX_NORM
    moments[sizes] = jax.device_get(state.optimiser_state[1].mu)
  norm = np.sqrt(
    sum(np.sum(np.square(m)) for m in jax.tree_util.tree_leaves(moments[_ONE]))
  )
  np.testing.assert_allclose(norm, 0.1 * _MAX_NORM, rtol=1e-5)
  errors = _relative_errors(moments[_SHARDED], moments[_ONE])
  assert max(errors.values()) < 1e-5, errors


def test_metrics_and_params_after_some_updates_equal_one_device():
  ends = {}
  for sizes in (_ONE, _SHARDED):
    compiled, _ = _update(sizes)
    state = _state(sizes)
    for seed in range(3):
      state, metrics = compiled(state, _place(_batch(seed), sizes))
    ends[sizes] = jax.device_get((metrics, state.params))
  assert set(ends[_ONE][0]) == set(update_lib.METRIC_NAMES)
  # Adam amplifies the last bits of small gradients; hence not tighter.
  jax.tree_util.tree_map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
    ends[_SHARDED],
    ends[_ONE],
  )


def test_a_non_finite_update_is_skipped_on_every_device():
  compiled, _ = _update(_SHARDED)
  reward = _batch().reward.copy()
  reward[5, 1] = np.nan
  bad = _batch(reward=reward, loss_mask=np.ones((_ROWS, _LENGTH), bool))
  bad = bad._replace(is_rejected=np.zeros((_ROWS, _LENGTH), bool))
  before, _ = compiled(_state(_SHARDED), _place(_batch(), _SHARDED))
  before = jax.device_get(before)
  state, _ = compiled(_state(_SHARDED), _place(_batch(), _SHARDED))
  state, metrics = compiled(state, _place(bad, _SHARDED))
  jax.tree_util.tree_map(
    np.testing.assert_array_equal,
    (before.params, before.optimiser_state),
    jax.device_get((state.params, state.optimiser_state)),
  )
  assert metrics['non_finite_updates'] == 1 and state.learner_step == 2
  # Whoever holds the same shard holds the same values.
  for x in jax.tree_util.tree_leaves(state.params):
    held = {}
    for shard in x.addressable_shards:
      values = held.setdefault(str(shard.index), np.asarray(shard.data))
      np.testing.assert_array_equal(values, shard.data)


def test_turns_are_needed_for_ratios_per_turn():
  mesh, _, objective = _objective(_ONE, 'turn')
  update = update_lib.make_update(objective, _optimiser(), mesh)
  with pytest.raises(ValueError, match=r'ratio \(turn\) needs turn_ids'):
    update(_state(_ONE), _place(_batch(turn_id=()), _ONE))


def test_micro_batches_must_divide_the_rows_of_a_device():
  mesh, _, objective = _objective(_SHARDED)
  update = update_lib.make_update(
    objective, _optimiser(), mesh, num_micro_batches=3
  )
  with pytest.raises(ValueError, match=r'num_micro_batches \(3\) must divide'):
    update(_state(_SHARDED), _place(_batch(), _SHARDED))


def _ppo_update(sizes, updates_per_batch):
  mesh, _, objective = _objective(sizes, 'turn', 'ppo')
  return update_lib.make_update(
    objective, _optimiser(), mesh, updates_per_batch=updates_per_batch
  )


def _group_batch():
  """With advantages, as PPO takes them."""
  advantage = np.random.default_rng(9).normal(size=(_ROWS, _LENGTH))
  return _batch(advantage=advantage.astype(np.float32))


def _rows(batch, rows):
  return jax.tree_util.tree_map(lambda x: x[np.asarray(rows)], batch)


def test_updates_of_a_batch_stay_close_to_the_policy_before_the_first():
  _, _, objective = _objective(_ONE, 'turn', 'ppo')
  batch = _group_batch()
  state, metrics = _ppo_update(_ONE, 2)(_state(_ONE), _place(batch, _ONE))
  mesh, _, _ = _objective(_ONE)
  prepared = jax.jit(
    mesh_lib.shard_map(
      objective.prepare,
      mesh=mesh,
      in_specs=(objective.param_specs, objective.batch_spec),
      out_specs=objective.batch_spec,
    )
  )(_params(), _place(batch, _ONE))
  once = _ppo_update(_ONE, 1)
  by_hand, clipped, losses = _state(_ONE), [], []
  for rows in (range(4), range(4, 8)):
    by_hand, one = once(by_hand, _rows(prepared, rows))
    clipped.append(float(one['ppo_clipped_low_fraction']))
    losses.append(float(one['loss']))
  # Only the second has gone somewhere.
  assert clipped[0] == 0 < clipped[1]
  np.testing.assert_allclose(metrics['loss'], np.mean(losses), rtol=1e-5)
  np.testing.assert_allclose(
    metrics['ppo_clipped_low_fraction'], np.mean(clipped), rtol=1e-5
  )
  assert (state.learner_step, by_hand.learner_step) == (1, 2)
  jax.tree_util.tree_map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    state.params,
    by_hand.params,
  )


def test_updates_of_a_batch_on_eight_devices_equal_one():
  """A device's first rows go into the first update, on any mesh."""
  ends = {}
  for sizes, rows in (
    (_ONE, [0, 1, 4, 5, 2, 3, 6, 7]),
    (_SHARDED, list(range(8))),
  ):
    batch = _rows(_group_batch(), rows)
    state, metrics = _ppo_update(sizes, 2)(_state(sizes), _place(batch, sizes))
    ends[sizes] = jax.device_get((metrics, state.params))
  assert ends[_ONE][0]['ppo_clipped_low_fraction'] > 0
  jax.tree_util.tree_map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
    ends[_SHARDED],
    ends[_ONE],
  )


def test_updates_per_batch_must_divide_the_rows_of_a_device():
  with pytest.raises(ValueError, match=r'updates_per_batch \(3\) must divide'):
    _ppo_update(_SHARDED, 3)(_state(_SHARDED), _place(_batch(), _SHARDED))
