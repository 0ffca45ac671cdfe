"""The transformer agent: real actors, a real server, a sharded learner."""

import json
import pathlib
import re

import binaries
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

_EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
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
  acted = binaries.metrics(tmp_path / 'run', 'actor_0')[-1]
  assert acted['tokens_total'] > acted['actor_steps_total'] > 0
  assert {'active_episodes', 'utilisation_permit'} <= acted.keys()
  # Of the last version: the policy has begun to differ from the uniform one.
  assert learnt[-1]['entropy'] < learnt[0]['entropy']
  evaluator = start('evaluator', '--checkpoint=run', '--evaluation_episodes=32')
  assert evaluator.wait(60) == 0, evaluator.err
  assert 'over 32 episodes' in evaluator.out
  assert re.search(r'success \d+ of 32 \(95% confidence', evaluator.out)
  line = refused('transcripts', '--run_dir=.')
  assert 'run_dir (.) must hold transcripts' in line
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
    f'--config={_EXAMPLES / "reverse_tokens.json"}',
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


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(660)
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_a_tiny_transformer_learns_to_use_a_tool(start, tmp_path, seed):
  """Nobody can guess what the tool says: without the call the score is 0."""
  local = start(
    'local',
    f'--config={_EXAMPLES / "lookup.json"}',
    f'--seed={seed}',
    '--run_dir=run',
    '--max_run_s=600',
  )
  assert local.wait(640) == 0, local.out + local.err
  evaluations = binaries.metrics(tmp_path / 'run', 'evaluator')
  assert evaluations[0]['evaluation_success_rate'] < 0.3
  assert evaluations[-1]['evaluation_success_rate'] >= 0.9
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['solved'] is True
  assert summary['recompiles_total'] == 0
  assert 0 < summary['policy_lag_mean'] <= summary['policy_lag_max'] <= 2
  assert not summary['dropped'].get('lag')
  learnt = binaries.metrics(tmp_path / 'run', 'learner')
  mismatches = [
    r['mismatch_log_prob'] for r in learnt if 'mismatch_log_prob' in r
  ]
  assert mismatches and max(mismatches) < 1e-3
  rows = (tmp_path / 'run' / 'transcripts.jsonl').read_text().splitlines()
  last = json.loads(rows[-1])
  assert last['score'] == 1
  assert [
    call['error'] for turn in last['turns'] for call in turn['calls']
  ] == [None]
  assert 'tool lookup' in local.out and 'policy: ' in local.out
  viewer = start('transcripts', '--run_dir=run', '--last=2')
  assert viewer.wait(30) == 0, viewer.err
  assert viewer.out.count('episode of version') == 2
  assert viewer.out.count('policy: ') == 4
