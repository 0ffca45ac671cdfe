"""Packed equals unpacked: outputs, loss and gradients, for every network."""

from dm_env import specs as dm_specs
import jax
import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.learner import objectives
from tunix_reverb.networks import policy_network

_VECTOR = dm_specs.Array((3,), np.float32)
_IMAGE = dm_specs.BoundedArray((9, 8, 2), np.uint8, 0, 255)
_DISCRETE = dm_specs.DiscreteArray(3)
_MULTI = dm_specs.BoundedArray((2,), np.int32, (0, 1), (1, 3))
_BOX = dm_specs.BoundedArray((2,), np.float32, -2.0, 1.0)

_LENGTHS = (5, 2, 7, 1, 4)
_ROW_LENGTH = 12

_CONFIG = objectives.LossConfig(
  discount_factor=0.9,
  rho_bar=1.2,
  c_bar=1.0,
  vtrace_lambda=0.9,
  entropy_cost=0.05,
)


def _environment_spec(observation, action):
  return specs.EnvironmentSpec(
    observation,
    action,
    dm_specs.Array((), np.float32),
    dm_specs.BoundedArray((), np.float32, 0, 1),
  )


def _trajectory(network, length, rng):
  """Columns of one trajectory, each padded to T + 1 entries."""
  observation_spec = network.environment_spec.observation
  action_spec = network.environment_spec.action
  n = length + 1
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  if observation_spec.dtype == np.uint8:
    observation = rng.integers(0, 255, (n, *observation_spec.shape), np.uint8)
  else:
    observation = normal(n, *observation_spec.shape)
  if np.issubdtype(action_spec.dtype, np.floating):
    action = normal(n, *action_spec.shape)
  else:
    action = rng.integers(
      action_spec.minimum,
      action_spec.maximum,
      (n, *action_spec.shape),
      endpoint=True,
    ).astype(np.uint8)
  discount = np.ones(n, np.float32)
  discount[length - 1] = rng.integers(0, 2)
  return {
    'observation': observation,
    'action': action,
    'reward': normal(n),
    'discount': discount,
    'behaviour_log_prob': -1 + 0.3 * normal(n),
    'policy_version': np.ones(n, np.int32),
    'loss_mask': rng.uniform(size=n) < 0.8,
    'core_state': jax.tree_util.tree_map(
      lambda s: normal(*s.shape), network.core_state_spec()
    ),
  }


def _pack(trajectories, rows):
  """Lays trajectories into rows; `rows` lists trajectory indices."""
  shape = (len(rows), _ROW_LENGTH)
  template = {k: v for k, v in trajectories[0].items() if k != 'core_state'}
  columns = {
    k: np.zeros(shape + v.shape[1:], v.dtype) for k, v in template.items()
  }
  columns['segment_ids'] = np.zeros(shape, np.int32)
  columns['segment_positions'] = np.zeros(shape, np.int32)
  segments = max(len(row) for row in rows)
  core_state = jax.tree_util.tree_map(
    lambda x: np.full((len(rows), segments, *x.shape), np.nan, x.dtype),
    trajectories[0]['core_state'],
  )
  for b, row in enumerate(rows):
    start = 0
    for m, index in enumerate(row):
      trajectory = trajectories[index]
      n = len(trajectory['reward'])
      for k in template:
        columns[k][b, start : start + n] = trajectory[k]
      columns['segment_ids'][b, start : start + n] = m + 1
      columns['segment_positions'][b, start : start + n] = np.arange(n)
      for to, value in zip(
        jax.tree_util.tree_leaves(core_state),
        jax.tree_util.tree_leaves(trajectory['core_state']),
      ):
        to[b, m] = value
      start += n
  # Slots of M that no segment uses hold what the packer leaves there: zeros.
  core_state = jax.tree_util.tree_map(np.nan_to_num, core_state)
  return types.Batch(**columns, core_state=core_state)


def _outputs(network, params, batch):
  return network.unroll(
    params,
    batch.observation,
    batch.core_state,
    batch.segment_ids,
    batch.segment_positions,
  )


def _by_trajectory(outputs, batch, rows):
  """Leaves [B, L, ...] -> list over trajectories of [T + 1, ...]."""
  result = {}
  for b, row in enumerate(rows):
    for m, index in enumerate(row):
      where = batch.segment_ids[b] == m + 1
      result[index] = [
        np.asarray(x)[b][where] for x in jax.tree_util.tree_leaves(outputs)
      ]
  return [result[i] for i in sorted(result)]


_CASES = {
  'mlp': (_VECTOR, _DISCRETE, {}),
  'mlp_multi': (_VECTOR, _MULTI, {}),
  'mlp_gaussian': (_VECTOR, _BOX, {}),
  'lstm': (_VECTOR, _DISCRETE, {'core': 'lstm'}),
  'gru': (_VECTOR, _DISCRETE, {'core': 'gru'}),
  'lstm_gaussian': (_VECTOR, _BOX, {'core': 'lstm'}),
  'impala': (_IMAGE, _DISCRETE, {}),
  'atari_gru_multi': (_IMAGE, _MULTI, {'torso': 'atari', 'core': 'gru'}),
}


@pytest.mark.parametrize('name', _CASES)
def test_packed_equals_unpacked(name):
  observation, action, kwargs = _CASES[name]
  network = policy_network.make_policy_network(
    _environment_spec(observation, action),
    hidden_sizes=(8, 8),
    core_size=5,
    **kwargs,
  )
  params = jax.jit(network.init)(jax.random.PRNGKey(0))
  # Away from the nearly uniform first policy, or nothing would be tested.
  params = jax.tree_util.tree_map(
    lambda x: (
      x + 0.1 * np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    ),
    params,
  )
  rng = np.random.default_rng(0)
  trajectories = [_trajectory(network, t, rng) for t in _LENGTHS]
  rows_of = {
    'packed': [[0, 1, 3], [2], [4]],
    'unpacked': [[i] for i in range(len(_LENGTHS))],
  }

  def evaluate(params, batch):
    count = np.float32(10)
    loss = lambda p: _CONFIG.total(
      objectives.batch_loss_sums(network, _CONFIG, p, batch), count
    )
    sums = objectives.batch_loss_sums(network, _CONFIG, params, batch)
    return _outputs(network, params, batch), sums, jax.grad(loss)(params)

  results = {}
  for kind, rows in rows_of.items():
    batch = _pack(trajectories, rows)
    outputs, sums, gradients = jax.jit(evaluate)(params, batch)
    results[kind] = (_by_trajectory(outputs, batch, rows), sums, gradients)

  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
  jax.tree_util.tree_map(close, results['packed'], results['unpacked'])
  sums = results['packed'][1]
  assert float(sums.num_transitions) > 5
  assert all(
    np.any(np.abs(g) > 0)
    for g in jax.tree_util.tree_leaves(results['packed'][2])
  )
