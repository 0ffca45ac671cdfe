"""Pretrained models say what `transformers` says, on any mesh, once loaded."""

import json
import shutil

import jax
import logits
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.models import checkpoint
from tunix_reverb.models import layout
from tunix_reverb.models import saving

_KEY = jax.random.PRNGKey(0)
_MESHES = [
  {},
  {'fsdp': 2, 'tensor': 2},
  {'data': 2, 'sequence': 2, 'tensor': 2},
  {'fsdp': 2, 'sequence': 2},
]


@pytest.mark.parametrize(('name', 'sizes'), list(zip(logits.NAMES, _MESHES)))
def test_log_probs_equal_the_reference(name, sizes):
  tokens, expected = logits.expected(name)
  model = checkpoint.open_checkpoint(str(logits.DATA / name))
  mesh = logits.make_mesh(**sizes)
  params = model.load(mesh, key=_KEY)
  got = logits.log_probs(model.config, mesh, params, tokens)
  np.testing.assert_allclose(got, expected, atol=2e-5)


def test_every_family_is_in_the_reference():
  configs = [
    checkpoint.open_checkpoint(str(logits.DATA / name)).config
    for name in logits.NAMES
  ]
  assert any(config.qk_norm for config in configs)
  assert any(config.qkv_bias for config in configs)
  assert any(config.rope_scaling for config in configs)
  assert {config.tied_embeddings for config in configs} == {True, False}


def test_each_device_holds_its_shards_and_the_value_head_is_fresh():
  model = checkpoint.open_checkpoint(str(logits.DATA / 'qwen3'))
  mesh = logits.make_mesh(data=2, fsdp=2, tensor=2)
  params = model.load(mesh, key=_KEY)
  query = params['layers']['query']
  layers, size, heads = query.shape
  assert {x.data.shape for x in query.addressable_shards} == {
    (layers, size // 2, heads // 2)
  }
  assert not np.any(params['value_head']['kernel'])


@pytest.mark.parametrize('name', logits.NAMES)
def test_what_is_saved_comes_back(name, tmp_path):
  model = checkpoint.open_checkpoint(str(logits.DATA / name))
  params = model.load(logits.make_mesh(tensor=2), key=_KEY)
  params['value_head']['kernel'] += 0.5
  saving.save(
    tmp_path / 'a', model.config, params, dtype='float32', max_file_bytes=9_000
  )
  assert len(list((tmp_path / 'a').glob('model-*.safetensors'))) > 2
  again = checkpoint.open_checkpoint(str(tmp_path / 'a'))
  assert again.config == model.config
  loaded = layout.flatten(again.load(logits.make_mesh(), key=_KEY))
  for path, leaf in layout.flatten(params).items():
    np.testing.assert_array_equal(loaded[path], leaf, err_msg=str(path))


def test_a_saved_file_is_one_that_the_library_reads(tmp_path):
  safetensors_numpy = pytest.importorskip(
    'safetensors.numpy', reason='safetensors is missing'
  )
  model = checkpoint.open_checkpoint(str(logits.DATA / 'qwen2'))
  params = model.load(logits.make_mesh(), key=_KEY)
  saving.save(tmp_path / 'a', model.config, params, dtype='float16')
  tensors = safetensors_numpy.load_file(tmp_path / 'a' / 'model.safetensors')
  assert tensors.keys() == set(model.source.names())
  name = 'model.layers.1.self_attn.q_proj.weight'
  np.testing.assert_array_equal(
    tensors[name], np.float16(params['layers']['query'][1].T)
  )


def test_saving_into_a_model_is_refused(tmp_path):
  model = checkpoint.open_checkpoint(str(logits.DATA / 'qwen2'))
  params = model.load(logits.make_mesh(), key=_KEY)
  saving.save(tmp_path / 'a', model.config, params, dtype='bfloat16')
  with pytest.raises(errors.UserError, match='holds a model already'):
    saving.save(tmp_path / 'a', model.config, params, dtype='bfloat16')


def _changed(tmp_path, **changes):
  """A copy of a model whose config.json differs."""
  path = shutil.copytree(logits.DATA / 'llama', tmp_path / 'copy')
  values = json.loads((path / 'config.json').read_text())
  (path / 'config.json').write_text(json.dumps({**values, **changes}))
  return str(path)


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'model_type': 'gpt2'}, "model_type .'gpt2'. must be one of llama, qwen2"),
    ({'attention_bias': True}, 'attention_bias .True. must be False'),
    ({'hidden_act': 'gelu'}, "hidden_act .'gelu'. must be 'silu'"),
    (
      {'rope_parameters': {'rope_type': 'yarn'}},
      "rope_type .'yarn'. must be default or llama3",
    ),
    ({'num_key_value_heads': 3}, 'must be a multiple of num_kv_heads'),
    ({'hidden_size': None}, 'hidden_size .None. must be a number'),
  ],
)
def test_a_model_of_another_kind_is_refused(tmp_path, changes, words):
  with pytest.raises(errors.UserError, match=words):
    checkpoint.open_checkpoint(_changed(tmp_path, **changes))


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'vocab_size': 96}, r'embed_tokens.weight .*\(72, 32\).* must be \(96'),
    ({'num_hidden_layers': 3}, 'must hold the tensor model.layers.2'),
    ({'num_hidden_layers': 1}, 'holds tensors .* such as model.layers.1'),
    ({'model_type': 'qwen3'}, 'must hold the tensor .*norm.weight'),
  ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, changes, words):
  model = checkpoint.open_checkpoint(_changed(tmp_path, **changes))
  with pytest.raises(errors.UserError, match=words):
    model.load(logits.make_mesh(), key=_KEY)


def test_what_is_no_model_is_refused(tmp_path):
  with pytest.raises(errors.UserError, match='must be a directory'):
    checkpoint.open_checkpoint(str(tmp_path / 'absent'))
  (tmp_path / 'config.json').write_text('[]')
  with pytest.raises(errors.UserError, match='must hold a JSON object'):
    checkpoint.open_checkpoint(str(tmp_path))


@pytest.mark.parametrize('kept', [4, 5_000, 80_000])
def test_a_file_cut_off_is_refused(tmp_path, kept):
  path = _changed(tmp_path)
  file = tmp_path / 'copy' / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:kept])
  with pytest.raises(errors.UserError, match='cut off'):
    checkpoint.open_checkpoint(path)
