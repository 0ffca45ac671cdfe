"""A transformer's sharded state through a checkpoint, onto other meshes."""

import jax
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.learner import checkpoints
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.networks.transformer import config as transformer_config
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.sharding import mesh as mesh_lib

_MODEL = transformer_config.TransformerConfig(
  vocabulary_size=48,
  num_layers=2,
  model_size=32,
  mlp_size=40,
  num_heads=8,
  num_kv_heads=8,
  head_size=4,
)
_OPTIMISER = optimiser_lib.make_optimiser(
  learning_rate=1e-3, learning_rate_end=1.0, decay_steps=10, max_grad_norm=1.0
)
_TIMEOUT_S = 60.0


def _parts(sizes):
  """(objective, mesh) for (data, fsdp, sequence, tensor)."""
  mesh = mesh_lib.make_mesh(
    jax.devices()[: int(np.prod(sizes))],
    **dict(zip(mesh_lib.AXES, sizes)),
  )
  model = model_lib.make_transformer(_MODEL, mesh)
  return objectives.token_objective(model, objectives.LossConfig()), mesh


def _trained(sizes, seed=0):
  """A state of which every leaf holds numbers of its own."""
  objective, mesh = _parts(sizes)
  state = update_lib.init_state(
    objective, _OPTIMISER, mesh, key=jax.random.PRNGKey(seed)
  )
  rng = np.random.default_rng(seed)

  def scribble(x):
    noise = rng.integers(1, 1 << 20, x.shape).astype(x.dtype)
    return jax.device_put(noise, x.sharding)

  return jax.tree_util.tree_map(scribble, state)


@pytest.fixture
def saved(tmp_path):
  """(state on a mesh of 2 x 2 x 2, the directory it was saved in)."""
  state = _trained((1, 2, 2, 2))
  expected = jax.device_get(state)
  checkpointer = checkpoints.LearnerCheckpointer(tmp_path, max_to_keep=2)
  assert checkpointer.save(3, state, {'transitions_total': 512})
  # As the next update would: the files do not need the buffers any more.
  jax.tree_util.tree_map(lambda x: x.delete(), state)
  checkpointer.close(_TIMEOUT_S)
  return expected, tmp_path


@pytest.mark.parametrize(
  'sizes', [(1, 2, 2, 2), (1, 4, 1, 2), (2, 1, 4, 1), (1, 1, 1, 1)]
)
def test_restores_bit_for_bit_onto_any_mesh(saved, sizes):
  expected, directory = saved
  objective, mesh = _parts(sizes)
  template = update_lib.abstract_state(objective, _OPTIMISER, mesh)
  checkpointer = checkpoints.LearnerCheckpointer(directory, max_to_keep=2)
  state, metadata = checkpointer.restore_latest(template)
  checkpointer.close(_TIMEOUT_S)
  assert metadata == {'transitions_total': 512}
  assert jax.tree_util.tree_structure(state) == jax.tree_util.tree_structure(
    expected
  )
  for x, wanted, shape in zip(
    *map(jax.tree_util.tree_leaves, (state, expected, template))
  ):
    assert np.asarray(x).tobytes() == np.asarray(wanted).tobytes()
    assert x.dtype == shape.dtype and x.sharding == shape.sharding
  # Nothing is whole on a device that should not be.
  split = sizes[1] * sizes[2] * sizes[3]
  for tree in (state.params, state.optimiser_state[1].mu):
    (shard, *_) = tree['embedding'].addressable_shards
    assert shard.data.size == 48 * 32 // split


def test_a_save_cut_short_is_never_loaded(saved):
  """The process died after Orbax's rename and before the seal, or amid it."""
  expected, directory = saved
  objective, mesh = _parts((1, 4, 1, 2))
  template = update_lib.abstract_state(objective, _OPTIMISER, mesh)
  checkpointer = checkpoints.LearnerCheckpointer(directory, max_to_keep=2)
  checkpointer.save(4, _trained((1, 4, 1, 2), seed=1), {})
  checkpointer.wait(_TIMEOUT_S)
  (directory / '4' / 'checksums.json').unlink()
  state, _ = checkpointer.restore_latest(template)
  np.testing.assert_array_equal(
    state.params['embedding'], expected.params['embedding']
  )
  (directory / '3' / 'checksums.json').unlink()
  with pytest.raises(errors.CheckpointError, match='can be loaded'):
    checkpointer.restore_latest(template)
  checkpointer.close(_TIMEOUT_S)
