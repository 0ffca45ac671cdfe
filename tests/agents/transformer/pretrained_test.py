"""A run that begins with a pretrained model, and what it leaves."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
import tiny_chat

from tunix_reverb import errors
from tunix_reverb.agents import builder
from tunix_reverb.agents import flat
from tunix_reverb.agents.transformer import pretrained
from tunix_reverb.models import checkpoint
from tunix_reverb.models import layout
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.text import huggingface

pytest.importorskip('tokenizers', reason='tokenizers is missing')

_FLAGS = {
  'agent': 'transformer',
  'environment': 'tool:calculator',
  'environments_per_actor': 2,
  'trajectory_length': 1023,
  'max_turn_tokens': 8,
  'bucket_lengths': (1024,),
  'batch_positions': 1024,
  'tensor_axis': 1,
  'data_axis': 1,
}


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  return tiny_chat.write(tmp_path_factory.mktemp('model') / 'tiny')


def _config(path, **flags):
  return flat.from_flat({**_FLAGS, 'model': path, **flags})


@pytest.mark.standard_dtype_promotion
def test_learning_begins_with_the_models_params(path):
  config = _config(path)
  agent = builder.make_agent(config)
  # How fresh params would be drawn is not in a checkpoint.
  assert agent.model == dataclasses.replace(
    tiny_chat.SIZES, init_scale=agent.model.init_scale
  )
  assert agent.columns.action.dtype == np.uint16
  parts = builder.make_learner_parts(config, agent)
  wanted = checkpoint.open_checkpoint(path).load(
    parts.mesh, key=jax.random.PRNGKey(0)
  )
  got = layout.flatten(parts.state.params)
  for name, leaf in layout.flatten(wanted).items():
    np.testing.assert_array_equal(got[name], leaf, err_msg=str(name))


def test_environments_speak_the_models_tokens(path):
  agent = builder.make_agent(_config(path))
  assert agent.play.vocabulary_size == 320
  assert agent.play.stop_tokens == huggingface.open_format(path).stop_tokens


def test_an_exported_model_is_a_model(path, tmp_path):
  model = checkpoint.open_checkpoint(path)
  mesh = mesh_lib.make_mesh(jax.devices()[:1], data=1)
  params = model.load(mesh, key=jax.random.PRNGKey(0))
  params['value_head']['bias'] += 2.0
  pretrained.export(tmp_path / 'a', path, model.config, params, dtype='float32')
  again = checkpoint.open_checkpoint(str(tmp_path / 'a'))
  assert again.config == model.config
  loaded = again.load(mesh, key=jax.random.PRNGKey(0))
  assert loaded['value_head']['bias'] == 2.0
  saved = huggingface.open_format(str(tmp_path / 'a'))
  assert saved.stop_tokens == huggingface.open_format(path).stop_tokens


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('small', 'must be one of tiny, 10m'),
    ('./absent', 'must be a directory with a readable config.json'),
    ('absent.gguf', 'must be a directory|readable'),
  ],
)
def test_a_model_that_is_not_there_is_refused(name, words):
  with pytest.raises(errors.UserError, match=words):
    builder.make_agent(_config(name))


def test_somebody_elses_server_must_be_there_to_play(path):
  config = _config(path, policy_url='http://127.0.0.1:9/v1')
  agent = builder.make_agent(config)
  with pytest.raises(errors.UserError, match=r'policy_url .*127\.0\.0\.1:9'):
    agent.make_acting(config, actor_id=0, writer=None, variables=None)


def test_the_example_of_a_pretrained_model_is_a_config():
  path = pathlib.Path(__file__).parents[3] / 'examples' / 'smollm2.json'
  config = flat.loads(path.read_text())
  assert config.transformer.model.endswith('.gguf')
  assert config.trajectories_per_update % config.transformer.group_size == 0
