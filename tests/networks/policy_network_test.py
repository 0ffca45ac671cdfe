"""Networks: shapes, initial policies, and `step` against `unroll`."""

from dm_env import specs as dm_specs
import jax
import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb.networks import cores
from tunix_reverb.networks import heads
from tunix_reverb.networks import policy_network
from tunix_reverb.networks import torsos
from tunix_reverb.ops import distributions

_DISCRETE = dm_specs.DiscreteArray(3)
_VECTOR = dm_specs.Array((4,), np.float32)
_IMAGE = dm_specs.BoundedArray((12, 10, 2), np.uint8, 0, 255)


def _spec(observation=_VECTOR, action=_DISCRETE):
  return specs.EnvironmentSpec(
    observation,
    action,
    dm_specs.Array((), np.float32),
    dm_specs.BoundedArray((), np.float32, 0, 1),
  )


def _network(observation=_VECTOR, action=_DISCRETE, **kwargs):
  kwargs = {'hidden_sizes': (8, 8), 'core_size': 6} | kwargs
  return policy_network.make_policy_network(
    _spec(observation, action), **kwargs
  )


def _observations(spec, shape, seed=0):
  rng = np.random.default_rng(seed)

  def leaf(s):
    if np.issubdtype(s.dtype, np.integer):
      return rng.integers(0, 200, size=shape + s.shape).astype(s.dtype)
    return rng.normal(size=shape + s.shape).astype(s.dtype)

  return jax.tree_util.tree_map(leaf, spec)


_NESTED = {
  'position': dm_specs.Array((2, 3), np.float64),
  'hand': (dm_specs.Array((), np.int32), dm_specs.Array((5,), np.uint8)),
}

_OBSERVATIONS = {
  'vector': (_VECTOR, 'mlp'),
  'nested': (_NESTED, 'mlp'),
  'image_mlp': (_IMAGE, 'mlp'),
  'image_impala': (_IMAGE, 'impala'),
  'image_atari': (_IMAGE, 'atari'),
}


@pytest.mark.parametrize(
  'name,core',
  [
    *((name, 'none') for name in _OBSERVATIONS if name != 'image_impala'),
    # 14 s; `update_packing_test` has it, too.
    pytest.param('image_impala', 'none', marks=pytest.mark.slow),
    ('nested', 'lstm'),
    ('nested', 'gru'),
    ('image_atari', 'lstm'),
  ],
)
def test_step_shapes_and_dtypes(name, core):
  observation, torso = _OBSERVATIONS[name]
  network = _network(observation, torso=torso, core=core)
  params = jax.jit(network.init)(jax.random.PRNGKey(0))
  state = network.initial_state(5)
  logits, values, new_state = jax.jit(network.step)(
    params,
    _stored(_observations(observation, (5,))),
    state,
    np.zeros(5, bool),
  )
  assert logits.shape == (5, 3) and logits.dtype == np.float32
  assert values.shape == (5,) and values.dtype == np.float32
  spec_of = lambda t: jax.tree_util.tree_map(lambda x: (x.shape, x.dtype), t)
  assert spec_of(new_state) == spec_of(state)
  if core == 'none':
    assert network.core_state_spec() == () == new_state
  else:
    batched = jax.tree_util.tree_map(
      lambda s: ((5, *s.shape), s.dtype), network.core_state_spec()
    )
    assert batched == spec_of(state)


def _stored(observation):
  return jax.tree_util.tree_map(
    lambda x: x.astype(specs.stored_observation_dtype(x.dtype)), observation
  )


@pytest.mark.parametrize('core', ['none', 'lstm', 'gru'])
def test_unroll_equals_steps(core):
  """One row with two segments is what two environments computed by steps."""
  network = _network(core=core)
  params = network.init(jax.random.PRNGKey(0))
  lengths = (4, 6)
  observations = [_observations(_VECTOR, (n,), seed=n) for n in lengths]
  start = jax.tree_util.tree_map(
    lambda x: np.random.default_rng(1).normal(size=x.shape).astype(x.dtype),
    network.initial_state(2),
  )
  step = jax.jit(network.step)
  logits, values = [], []
  for n, observation in enumerate(observations):
    state = jax.tree_util.tree_map(lambda x, n=n: x[n : n + 1], start)
    for x in observation:
      p, v, state = step(params, x[None], state, np.zeros(1, bool))
      logits.append(p[0])
      values.append(v[0])
  row = np.concatenate([*observations, np.zeros((2, 4), np.float32)])
  ids = np.array([[1] * 4 + [2] * 6 + [0] * 2], np.int32)
  positions = np.array([[*range(4), *range(6), 0, 0]], np.int32)
  core_state = jax.tree_util.tree_map(lambda x: x[None], start)
  p, v = jax.jit(network.unroll)(params, row[None], core_state, ids, positions)
  assert p.shape == (1, 12, 3) and v.shape == (1, 12)
  np.testing.assert_allclose(p[0, :10], logits, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(v[0, :10], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('core', ['lstm', 'gru'])
def test_is_first_resets_the_core_state(core):
  network = _network(core=core)
  params = network.init(jax.random.PRNGKey(0))
  observation = _observations(_VECTOR, (2,))
  dirty = jax.tree_util.tree_map(lambda x: x + 1.0, network.initial_state(2))
  is_first = np.array([True, False])
  mixed = network.step(params, observation, dirty, is_first)
  fresh = network.step(params, observation, network.initial_state(2), is_first)
  kept = network.step(params, observation, dirty, np.zeros(2, bool))
  for m, f, k in zip(*map(jax.tree_util.tree_leaves, (mixed, fresh, kept))):
    np.testing.assert_allclose(m[0], f[0], rtol=1e-6)
    np.testing.assert_allclose(m[1], k[1], rtol=1e-6)
    assert not np.allclose(f[1], k[1])


@pytest.mark.parametrize('core', ['lstm', 'gru'])
def test_core_remembers(core):
  network = _network(core=core)
  params = network.init(jax.random.PRNGKey(0))
  ids = np.ones((1, 8), np.int32)
  positions = np.arange(8, dtype=np.int32)[None]
  state = jax.tree_util.tree_map(lambda x: x[None], network.initial_state(1))
  observation = _observations(_VECTOR, (1, 8))
  _, before = network.unroll(params, observation, state, ids, positions)
  observation[0, 0] += 1
  _, after = network.unroll(params, observation, state, ids, positions)
  assert abs(after[0, -1] - before[0, -1]) > 1e-6


def test_auto_takes_impala_for_uint8_images_only():
  make = lambda s: torsos.make_torso('auto', s, hidden_sizes=(4,))
  assert isinstance(make(_IMAGE), torsos.ImpalaTorso)
  assert isinstance(make({'pixels': _IMAGE}), torsos.ImpalaTorso)
  assert isinstance(make(_VECTOR), torsos.MLPTorso)
  assert isinstance(make(_NESTED), torsos.MLPTorso)
  floats = dm_specs.Array((12, 10, 2), np.float32)
  assert isinstance(make(floats), torsos.MLPTorso)


def test_impala_has_fifteen_convolutions():
  network = _network(_IMAGE)
  params = jax.eval_shape(network.init, jax.random.PRNGKey(0))
  kernels = [x for x in jax.tree_util.tree_leaves(params) if x.ndim == 4]
  assert len(kernels) == 15
  assert [k.shape[-1] for k in kernels].count(32) == 10


def test_images_are_scaled_and_vectors_are_not():
  torso = torsos.MLPTorso((4,))
  key = jax.random.PRNGKey(0)
  image = np.full((1, 2, 2, 1), 255, np.uint8)
  params = torso.init(key, image)
  np.testing.assert_allclose(
    torso.apply(params, image),
    torso.apply(params, np.ones((1, 2, 2, 1), np.float32)),
    rtol=1e-6,
  )
  vector = np.full((1, 4), 2, np.uint8)
  np.testing.assert_allclose(
    torso.apply(params, vector),
    torso.apply(params, np.full((1, 4), 2, np.float32)),
    rtol=1e-6,
  )


def test_first_policy_is_nearly_uniform():
  network = _network(hidden_sizes=(64, 64))
  params = network.init(jax.random.PRNGKey(0))
  logits, _, _ = network.step(
    params, _observations(_VECTOR, (50,)), (), np.zeros(50, bool)
  )
  entropy = network.distribution.entropy(logits)
  assert np.min(entropy) > np.log(3) - 1e-3


def test_heads_of_each_action_spec():
  make = heads.make_policy_head
  _, distribution = make(dm_specs.BoundedArray((), np.int64, 2, 5))
  assert distribution == distributions.Categorical(4, 2)
  head, distribution = make(
    dm_specs.BoundedArray((3,), np.int32, (0, 1, 0), (1, 5, 2))
  )
  assert distribution == distributions.MultiCategorical((2, 5, 3), (0, 1, 0))
  assert head.num_logits == 10
  head, distribution = make(
    dm_specs.BoundedArray((2,), np.float64, (-2, -1), (4, np.inf))
  )
  assert distribution == distributions.DiagonalGaussian((2,))
  assert head.centre == (1.0, 0.0) and head.half_range == (3.0, 1.0)


@pytest.mark.parametrize('shape', [(), (2,), (2, 2)])
def test_first_gaussian_covers_the_bounds(shape):
  action = dm_specs.BoundedArray(shape, np.float32, 2.0, 6.0)
  network = _network(action=action)
  params = network.init(jax.random.PRNGKey(0))
  gaussian, _, _ = network.step(
    params, _observations(_VECTOR, (7,)), (), np.zeros(7, bool)
  )
  assert gaussian.mean.shape == gaussian.log_std.shape == (7, *shape)
  np.testing.assert_allclose(gaussian.mean, 4.0, atol=0.2)
  np.testing.assert_allclose(np.exp(gaussian.log_std), 1.0, rtol=1e-5)


@pytest.mark.parametrize(
  'build,message',
  [
    (lambda: _network(torso='vit'), r"torso \('vit'\) must be"),
    (lambda: _network(core='rnn'), r"core \('rnn'\) must be"),
    (lambda: _network(torso='impala'), r'one \[H, W, C\] image'),
    (lambda: _network(action=dm_specs.Array((), np.int32)), 'bounded integers'),
    (
      lambda: _network(action=dm_specs.BoundedArray((2, 2), np.int32, 0, 1)),
      'rank 0 or 1',
    ),
    (lambda: _network(action={'a': _DISCRETE}), 'single dm_env array spec'),
  ],
)
def test_refuses_what_it_cannot_build(build, message):
  with pytest.raises(ValueError, match=message):
    build()


def test_select_state_broadcasts_over_any_rank():
  condition = np.array([True, False])
  on_true = {'a': np.ones((2, 3)), 'b': np.ones((2, 3, 4))}
  on_false = jax.tree_util.tree_map(np.zeros_like, on_true)
  out = cores.select_state(condition, on_true, on_false)
  np.testing.assert_array_equal(out['a'][:, 0], [1, 0])
  np.testing.assert_array_equal(out['b'][:, 0, 0], [1, 0])
