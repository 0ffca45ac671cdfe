"""A pretrained model, agents outside, a real server, a learner, an export."""

import importlib.util
import pathlib
import sys
import time

import binaries
import pytest

from launch import topology

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

for library in ('openai', 'starlette', 'tokenizers', 'uvicorn'):
  pytest.importorskip(library, reason=f'{library} is missing')

import httpx  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'models'))

import tiny_chat  # noqa: E402

from tunix_reverb.models import checkpoint  # noqa: E402
from tunix_reverb.text import huggingface  # noqa: E402

_DEADLINE_S = 120.0


def _wait_for_endpoint(url, local):
  deadline_s = time.monotonic() + _DEADLINE_S
  while time.monotonic() < deadline_s:
    assert local.status is None, local.out + local.err
    try:
      if httpx.get(f'{url}/health', timeout=5).status_code == 200:
        return
    except httpx.TransportError:
      time.sleep(0.2)
  pytest.fail(f'no endpoint after {_DEADLINE_S} s: {local.out}')


def _agent():
  """The documented example, which is not part of the wheel."""
  path = pathlib.Path(__file__).parents[2] / 'examples' / 'outside_agent.py'
  spec = importlib.util.spec_from_file_location('outside_agent', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_agents_outside_train_a_pretrained_model(start, tmp_path):
  model = tiny_chat.write(tmp_path / 'model')
  (port,) = topology.pick_free_ports(1)
  local = start(
    'local',
    '--agent=transformer',
    '--environment=outside',
    f'--model={model}',
    f'--endpoint_port={port}',
    '--num_actors=1',
    '--environments_per_actor=1',
    '--trajectory_length=127',
    '--item_bytes=1',
    '--bucket_lengths=128',
    '--batch_positions=256',
    '--max_learner_steps=3',
    '--learning_rate=0.01',
    '--run_dir=run',
  )
  url = f'http://127.0.0.1:{port}'
  _wait_for_endpoint(url, local)
  assert 4 <= _agent().main(url, episodes=1000) < 1000
  assert local.wait(60) == 0, local.out + local.err
  learnt = [
    row
    for row in binaries.metrics(tmp_path / 'run', 'learner')
    if 'loss' in row
  ]
  assert learnt[-1]['learner_step'] == 3
  assert learnt[-1]['recompiles_total'] == 0
  export = start(
    'export_model', '--checkpoint=run', '--output=out', '--dtype=float32'
  )
  assert export.wait(60) == 0, export.err
  before = checkpoint.open_checkpoint(model)
  after = checkpoint.open_checkpoint(str(tmp_path / 'out'))
  assert after.config == before.config
  name = 'model.layers.0.mlp.up_proj.weight'
  everything = (slice(None), slice(None))
  assert (
    after.source.read(name, everything) != before.source.read(name, everything)
  ).any()
  assert huggingface.open_format(str(tmp_path / 'out')).stop_tokens == (1,)
