"""The transformer agent: real actors, a real server, a sharded learner."""

import json
import pathlib

import binaries
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

_EXAMPLE = pathlib.Path(__file__).parents[2] / 'examples/reverse_tokens.json'
_TOKENS = (
  '--agent=transformer',
  '--environment=tool:reverse/3',
  '--num_actors=1',
  '--environments_per_actor=64',
  '--trajectory_length=7',
  '--evaluation_episodes=64',
  '--run_dir=run',
)


def test_a_short_run_on_four_virtual_devices(start, refused, tmp_path):
  local = start(
    'local',
    *_TOKENS,
    '--bucket_lengths=16,32',
    '--batch_positions=512',
    '--virtual_devices=4',
    '--fsdp_axis=2',
    '--tensor_axis=2',
    '--max_learner_steps=30',
  )
  assert local.wait(120) == 0, local.out + local.err
  assert local.err == ''
  rows = binaries.metrics(tmp_path / 'run', 'learner')
  learnt = [row for row in rows if 'loss' in row]
  assert learnt[-1]['learner_step'] == 30
  assert learnt[-1]['recompiles_total'] == 0
  assert learnt[-1]['batch_fill'] > 0.7
  assert 0 < learnt[-1]['policy_lag_max'] <= 64
  # Of the last version: the policy has begun to differ from the uniform one.
  assert learnt[-1]['entropy'] < learnt[0]['entropy']
  evaluator = start('evaluator', '--checkpoint=run', '--evaluation_episodes=32')
  assert evaluator.wait(60) == 0, evaluator.err
  assert 'over 32 episodes' in evaluator.out
  line = refused(
    'learner', *_TOKENS[:-1], '--tensor_axis=2', '--replay_servers=localhost:1'
  )
  assert 'must be <= the devices there are (1); virtual_devices' in line


@pytest.mark.slow
@pytest.mark.learning
def test_a_tiny_transformer_learns_to_reverse_on_eight_virtual_devices(
  start, tmp_path
):
  local = start(
    'local',
    f'--config={_EXAMPLE}',
    '--virtual_devices=8',
    '--data_axis=2',
    '--fsdp_axis=2',
    '--tensor_axis=2',
    '--run_dir=run',
    '--max_run_s=220',
  )
  assert local.wait(235) == 0, local.out + local.err
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['solved'] is True
  assert summary['recompiles_total'] == 0
  assert 0 < summary['policy_lag_mean'] <= summary['policy_lag_max'] <= 64
  assert not summary['dropped'].get('lag')
  learnt = [
    row
    for row in binaries.metrics(tmp_path / 'run', 'learner')
    if 'loss' in row
  ]
  assert learnt[-1]['value_mean'] > learnt[0]['value_mean'] + 0.3
