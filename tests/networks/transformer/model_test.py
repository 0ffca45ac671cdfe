"""The transformer on meshes of many shapes, against a plain one on one device.

Together the entries of the table take every remat policy, both kinds of
attention that run here, and several micro-batches.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.networks.transformer import presets
from tunix_reverb.sharding import mesh as mesh_lib

pytestmark = pytest.mark.slow

_CONFIG = oracle.ALL_OPTIONS
_F32 = oracle.F32
_ONE_DEVICE = (1, 1, 1, 1)
# (data, fsdp, sequence, tensor), remat, attention, micro-batches.
_MESHES = [
  (_ONE_DEVICE, 'attention', 'blocked', 4),
  ((8, 1, 1, 1), 'layer', 'reference', 1),
  ((1, 8, 1, 1), 'layer', 'reference', 1),
  ((1, 1, 8, 1), 'attention', 'blocked', 2),
  ((1, 1, 1, 8), 'dots', 'reference', 1),
  ((2, 4, 1, 1), 'none', 'reference', 1),
  ((4, 1, 2, 1), 'layer', 'blocked', 2),
  ((2, 1, 1, 4), 'none', 'reference', 1),
  ((1, 4, 2, 1), 'dots', 'blocked', 1),
  ((1, 2, 1, 4), 'attention', 'reference', 4),
  ((1, 1, 2, 4), 'none', 'blocked', 1),
  ((1, 2, 2, 2), 'attention', 'blocked', 2),
]


@pytest.fixture(scope='module')
def expected():
  """(params, batch, loss, gradients) of the oracle."""
  params = oracle.random_params(_CONFIG)
  batch = oracle.packed_batch(_CONFIG, rows=8, length=16)
  return params, batch, *oracle.loss_and_gradients(_CONFIG, params, batch)


@pytest.mark.parametrize('sizes,remat,attention,num_micro_batches', _MESHES)
def test_loss_and_gradients_equal_one_device(
  sizes, remat, attention, num_micro_batches, expected
):
  params, batch, expected_loss, expected_gradients = expected
  loss, gradients = oracle.sharded_loss_and_gradients(
    _CONFIG,
    dataclasses.replace(_F32, remat=remat, attention=attention),
    sizes,
    params,
    batch,
    num_micro_batches=num_micro_batches,
  )
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
  errors = oracle.relative_errors(gradients, expected_gradients)
  assert max(errors.values()) < 1e-5, errors


def test_bfloat16_stays_within_a_cosine_of_float32(expected):
  params, batch, expected_loss, expected_gradients = expected
  loss, gradients = oracle.sharded_loss_and_gradients(
    _CONFIG,
    dataclasses.replace(_F32, dtype='bfloat16'),
    (1, 2, 2, 2),
    params,
    batch,
  )
  np.testing.assert_allclose(loss, expected_loss, rtol=2e-2)
  assert oracle.cosine(gradients, expected_gradients) > 0.999
  assert all(
    x.dtype == jnp.float32 for x in jax.tree_util.tree_leaves(gradients)
  )


def test_packed_rows_equal_one_segment_per_row(expected):
  params, batch, expected_loss, expected_gradients = expected
  alone = oracle.unpack(batch)
  assert alone[0].shape[0] > 2 * batch[0].shape[0]
  loss, gradients = oracle.sharded_loss_and_gradients(
    _CONFIG, _F32, _ONE_DEVICE, params, alone
  )
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
  errors = oracle.relative_errors(gradients, expected_gradients)
  assert max(errors.values()) < 1e-5, errors


_SMALL = dataclasses.replace(
  oracle.TINY,
  vocabulary_size=50,
  model_size=24,
  num_heads=6,
  num_kv_heads=2,
  head_size=8,
)
# Log-probs and entropies at positions 0, 5 and 13 from Hugging Face
# transformers 5.24 in float64, with `oracle.formula_params`.
_GOLDEN = {
  'llama2': (
    dataclasses.replace(_SMALL, num_kv_heads=6),
    [-8.42301, -4.32717, -8.42706],
    [2.95189, 3.01448, 2.94848],
  ),
  'llama3.1': (
    dataclasses.replace(
      _SMALL,
      rope_theta=500.0,
      rope_scaling=config_lib.RopeScaling(factor=8.0, original_length=64),
    ),
    [-8.77928, -2.70669, -6.76549],
    [2.9701, 3.02027, 2.98787],
  ),
  'qwen2': (
    dataclasses.replace(
      _SMALL, qkv_bias=True, norm_epsilon=1e-6, tied_embeddings=True
    ),
    [-5.26723, -5.68998, -2.95001],
    [3.00694, 2.99218, 3.00837],
  ),
  'qwen3': (
    dataclasses.replace(
      _SMALL, qk_norm=True, norm_epsilon=1e-6, tied_embeddings=True
    ),
    [-5.19496, -5.17774, -2.77071],
    [3.00777, 2.99107, 3.00853],
  ),
}


@pytest.mark.parametrize('family', _GOLDEN)
def test_equals_hugging_face(family):
  config, log_probs, entropies = _GOLDEN[family]
  index = np.arange(14, dtype=np.int32)[None]
  batch = (7 * index % 50, (11 * index + 3) % 50, np.ones_like(index), index)
  outputs = oracle.sharded_outputs(
    config,
    dataclasses.replace(_F32, attention='reference'),
    (1, 1, 1, 2),
    oracle.formula_params(config),
    batch,
  )
  at = [0, 5, 13]
  np.testing.assert_allclose(outputs.log_prob[0, at], log_probs, atol=3e-5)
  np.testing.assert_allclose(outputs.entropy[0, at], entropies, atol=3e-5)


@pytest.mark.parametrize(
  'name,billions',
  [
    ('llama2-7b', 6.738415616),
    ('llama3-8b', 8.030261248),
    ('llama3-70b', 70.553706496),
    ('llama3.2-1b', 1.235814400),
    ('qwen2-0.5b', 0.494032768),
    ('qwen2-7b', 7.615616512),
    ('qwen2-72b', 72.706203648),
    ('qwen3-0.6b', 0.596049920),
    ('qwen3-8b', 8.190735360),
    ('qwen3-32b', 32.762123264),
  ],
)
def test_presets_have_the_published_number_of_params(name, billions):
  config = presets.get(name)
  value_head = config.model_size + 1
  assert params_lib.count(config) == round(billions * 1e9) + value_head


def test_unknown_preset_names_the_known_ones():
  with pytest.raises(
    ValueError, match=r"model \('gpt'\) must be one of 10m, l"
  ):
    presets.get('gpt')


def test_init_makes_shards_that_do_not_depend_on_the_mesh():
  key = jax.random.PRNGKey(0)
  model = oracle.make_model(oracle.TINY, _F32, (1, 2, 2, 2))
  params = model.init(key)
  expected = params_lib.init(oracle.TINY, key)
  jax.tree_util.tree_map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-6), params, expected
  )
  query = params['layers']['query']
  assert query.shape == (2, 32, 64)
  assert {s.data.shape for s in query.addressable_shards} == {(2, 8, 32)}
  assert not np.any(params['value_head']['kernel'])
  # What writes into the residual stream is smaller by sqrt(2 * 2).
  ratio = np.std(params['layers']['output']) / np.std(params['layers']['up'])
  np.testing.assert_allclose(ratio, 0.5, rtol=0.1)


def test_first_policy_is_nearly_uniform_and_its_values_are_0():
  model = oracle.make_model(oracle.TINY, _F32, _ONE_DEVICE)
  batch = oracle.packed_batch(oracle.TINY, rows=2, length=16)
  outputs = oracle.sharded_outputs(
    oracle.TINY, _F32, _ONE_DEVICE, model.init(jax.random.PRNGKey(0)), batch
  )
  assert np.min(outputs.entropy) > np.log(oracle.TINY.vocabulary_size) - 0.02
  np.testing.assert_array_equal(outputs.value, 0)


def test_gathered_params_are_never_kept():
  """Memory of the step grows by a layer's shard per layer, not by the layer.

  With the policy that keeps the most: what it may not keep is what came from
  other devices.
  """

  def num_bytes(num_layers):
    config = dataclasses.replace(
      oracle.TINY, num_layers=num_layers, mlp_size=4096
    )
    compute = dataclasses.replace(_F32, remat='none', attention='reference')
    model = oracle.make_model(config, compute, (1, 8, 1, 1))
    batch = oracle.packed_batch(config, rows=8, length=4)
    step = functools.partial(oracle.sharded_step, model, 1.0, 1)
    params = params_lib.shapes(config)
    compiled = oracle.compile_fast(step, params, batch)
    return compiled.memory_analysis().temp_size_in_bytes

  few, many = num_bytes(4), num_bytes(12)
  layer = 4 * 3 * 4096 * oracle.TINY.model_size
  # Eight more layers. The CPU backend counts all eight devices' temporaries
  # as one device's.
  assert many - few < 8 * layer


@pytest.mark.parametrize(
  'changes,message',
  [
    ({'num_heads': 6}, r'num_heads \(6\) must be a multiple of num_kv_heads'),
    ({'head_size': 5}, r'head_size \(5\) must be even'),
    ({'num_layers': 0}, r'num_layers \(0\) must be at least 1'),
  ],
)
def test_refuses_sizes_that_make_no_model(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(oracle.TINY, **changes)


@pytest.mark.parametrize(
  'changes,message',
  [
    ({'remat': 'all'}, r"remat \('all'\) must be one of layer, attention"),
    ({'dtype': 'float16'}, r"dtype \('float16'\) must be one of bfloat16"),
    ({'head_block': 0}, r'head_block \(0\) must be at least 1'),
  ],
)
def test_refuses_ways_to_compute_that_it_has_not(changes, message):
  with pytest.raises(ValueError, match=message):
    config_lib.ComputeConfig(**changes)


@pytest.mark.parametrize(
  'changes,sizes,message',
  [
    ({'num_kv_heads': 4}, (1, 1, 1, 8), r'num_kv_heads \(4\) must be'),
    ({'vocabulary_size': 49}, (1, 1, 1, 2), r'vocabulary_size \(49\) must be'),
    ({'model_size': 34}, (1, 2, 2, 1), r'model_size \(34\) must be .* \(4\)'),
  ],
)
def test_refuses_a_mesh_that_does_not_divide_the_model(changes, sizes, message):
  config = dataclasses.replace(oracle.TINY, **changes)
  with pytest.raises(ValueError, match=message):
    oracle.make_model(config, _F32, sizes)


def test_refuses_rows_that_do_not_divide_over_tensor():
  batch = oracle.packed_batch(oracle.TINY, rows=1, length=12)
  with pytest.raises(ValueError, match=r'sequence \(12\) must be a multiple'):
    oracle.sharded_outputs(
      oracle.TINY,
      _F32,
      (1, 1, 1, 8),
      oracle.random_params(oracle.TINY),
      batch,
    )


def test_sixteen_devices_split_all_four_axes(subprocess_env, tmp_path):
  """Eight devices cannot: two along each axis are sixteen."""
  oracle.run_on_sixteen_devices(subprocess_env, tmp_path)


def test_specs_name_only_axes_of_the_mesh():
  specs = params_lib.specs(presets.get('qwen3-0.6b'))
  for spec in jax.tree_util.tree_leaves(
    specs, is_leaf=lambda x: isinstance(x, mesh_lib.PartitionSpec)
  ):
    assert set(mesh_lib.axes_of(spec)) <= set(mesh_lib.AXES)
