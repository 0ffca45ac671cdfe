"""Whole runs: solve, evaluate, resume, and what is killed in between."""

import json
import re
import shlex
import signal
import struct

import binaries
import pytest
from tensorboardX.proto import event_pb2

from tunix_reverb.replay import client_names
from tunix_reverb.telemetry import metrics as metrics_lib

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

_SMALL = ('--environment=catch', '--environments_per_actor=8')


def _events(directory):
  """TensorBoard's events: length, checksum, data, checksum, and so on."""
  for path in directory.glob('events*'):
    data, at = path.read_bytes(), 0
    while at < len(data):
      (size,) = struct.unpack_from('<Q', data, at)
      yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
      at += size + 16


def _checkpoints(run_dir):
  directory = run_dir / 'checkpoints' / 'learner'
  if not directory.is_dir():
    return []
  return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


def test_solve_evaluate_and_resume(start, refused, tmp_path):
  run_dir = tmp_path / 'run'
  local = start(
    'local', '--environment=catch', '--solved_return=0.95', '--run_dir=run'
  )
  assert local.wait(120) == 0, local.out + local.err
  assert local.err == ''
  assert 'solved: mean return' in local.out
  assert 'launch.local --run_dir=run --resume' in local.out
  assert 'launch.evaluator --checkpoint=run' in local.out
  _check_summary(run_dir)
  _check_metrics(run_dir)
  _check_tensorboard(run_dir)

  evaluator = start('evaluator', '--checkpoint=run', '--evaluation_episodes=40')
  assert evaluator.wait(60) == 0, evaluator.err
  assert re.search(
    r'return \d\.\d+ \+- \d\.\d+ \(mean \+- standard deviation over 40 '
    r'episodes\), from -?\d',
    evaluator.out,
  ), evaluator.out

  assert '--resume' in refused('local', '--run_dir=run')
  step = binaries.last(run_dir, 'learner', 'learner_step')
  total = binaries.last(run_dir, 'learner', 'transitions_total')
  resumed = start('local', '--run_dir=run', '--resume', '--solved_return=inf')
  binaries.wait_until(
    lambda: binaries.last(run_dir, 'learner', 'learner_step') > step + 100,
    resumed,
    90,
  )
  assert binaries.last(run_dir, 'learner', 'transitions_total') > total
  children = resumed.children()
  assert resumed.stop(signal.SIGINT) == 0, resumed.err
  binaries.wait_gone(children.values())
  assert 'stopped by a signal' in resumed.out
  steps = [row['step'] for row in binaries.metrics(run_dir, 'learner')]
  assert steps == sorted(steps)
  assert _checkpoints(run_dir)[-1] == steps[-1]
  assert (
    f'resumed from learner step {step:.0f}'
    in (run_dir / 'milestones.jsonl').read_text()
  ), list(run_dir.iterdir())


def _check_summary(run_dir):
  summary = json.loads((run_dir / 'summary.json').read_text())
  assert summary['solved'] is True
  assert summary['evaluation_return_mean'] >= 0.95
  assert summary['recompiles_total'] == 0
  assert summary['restarts'] == {}
  assert 0 < summary['policy_lag_mean'] <= summary['policy_lag_max'] <= 64
  rows = binaries.metrics(run_dir, 'learner')
  dropped = {
    cause: rows[-1][f'dropped_{cause}_total']
    for cause in metrics_lib.DROP_CAUSES
  }
  assert summary['dropped'] == {c: n for c, n in dropped.items() if n}
  # Nothing was too old; what the feed held at the end is accounted for.
  assert dropped['lag'] == dropped['age'] == dropped['poison'] == 0
  assert dropped['shutdown'] > 0
  assert sum(dropped.values()) == sum(
    rows[-1][f'dropped_decile_{i}_total'] for i in range(10)
  )


# Of the learner's permits and the server's sweeper, which this run is without.
_ADMISSION_METRICS = ('admission_', 'permits_', 'swept_', 'sweep_')
# Of environments that are played in turns; `tokens_test` looks for them.
_TURN_METRICS = (
  'active_episodes',
  'conversations_',
  'evaluation_success_',
  'mismatch_',
  'segments_',
  'tokens_',
  'tool_',
  'truncated_',
  'utilisation_permit',
)


def _check_metrics(run_dir):
  """Every line is valid, by its role, and no listed metric is missing."""
  seen = set()
  roles = sorted(p.stem for p in (run_dir / 'metrics').iterdir())
  assert roles == [
    'actor_0',
    'actor_1',
    'evaluator',
    'learner',
    'replay_server_0',
  ]
  for role in roles:
    kind = re.sub(r'_\d+$', '', role)
    for row in binaries.metrics(run_dir, role):
      assert row.pop('role') == role
      names = row.keys() - {'time_s', 'step'}
      metrics_lib.check_names(names)
      assert all(kind in metrics_lib.METRICS[n].roles for n in names)
      seen |= names
  missing = metrics_lib.METRICS.keys() - seen
  others = (*_ADMISSION_METRICS, *_TURN_METRICS)
  assert not {
    n
    for n in missing
    if not n.startswith(others) and not n.endswith('_errors_total')
  }


def _check_tensorboard(run_dir):
  for path in (run_dir / 'metrics').iterdir():
    rows = binaries.metrics(run_dir, path.stem)
    events = [e for e in _events(run_dir / 'tensorboard' / path.stem) if e.step]
    assert {e.step for e in events} == {row['step'] for row in rows}
    for value in events[-1].summary.value:
      assert value.simple_value == pytest.approx(rows[-1][value.tag], rel=1e-5)


def test_killed_roles(start, tmp_path):
  """An actor comes back; without its learner the run ends and is resumed."""
  run_dir = tmp_path / 'run'
  local = start(
    'local',
    *_SMALL,
    '--run_dir=run',
    '--evaluation_period_s=0',
    '--learner_checkpoint_period_s=1',
  )
  step = lambda: binaries.last(run_dir, 'learner', 'learner_step', 0)
  binaries.wait_until(step, local, 90)
  local.children()['actor_0'].kill()
  binaries.wait_until(
    lambda: 'actor_0 died (killed by SIGKILL)' in local.out, local
  )
  before = step()
  binaries.wait_until(lambda: step() > before + 20, local)
  rows = len(binaries.metrics(run_dir, 'actor_0'))
  binaries.wait_until(
    lambda: len(binaries.metrics(run_dir, 'actor_0')) > rows + 1, local
  )
  binaries.wait_until(lambda: _checkpoints(run_dir), local)

  children = local.children()
  assert children.keys() == {'replay_server_0', 'learner', 'actor_0', 'actor_1'}
  children['learner'].kill()
  assert local.wait(10.0) == 1
  assert local.err == 'error: learner ended (killed by SIGKILL)\n'
  binaries.wait_gone(children.values())
  summary = json.loads((run_dir / 'summary.json').read_text())
  assert summary['restarts'] == {'actor_0': 1}

  (command,) = re.findall(r'^Resume: +(.*)$', local.out, re.MULTILINE)
  saved, published = _checkpoints(run_dir)[-1], _last_version(run_dir)
  assert saved <= step()
  target = saved + 60
  resumed = start(
    'local', command=[*shlex.split(command), f'--max_learner_steps={target}']
  )
  assert resumed.wait(90) == 0, resumed.out + resumed.err
  assert 'learner completed' in resumed.out
  assert _checkpoints(run_dir)[-1] == target
  # Actors that still hold what the killed learner published take newer ones.
  assert _last_version(run_dir) > published


@pytest.mark.parametrize('client', client_names.CLIENTS)
def test_a_killed_replay_server_comes_back(start, tmp_path, client):
  """From its checkpoint, on its port; the other roles live through it."""
  if client == client_names.OFFICIAL and not binaries.HAS_REVERB:
    pytest.skip('the official client needs dm-reverb')
  run_dir = tmp_path / 'run'
  local = start(
    'local',
    *_SMALL,
    '--run_dir=run',
    f'--replay_client={client}',
    '--num_actors=1',
    '--evaluation_period_s=0.5',
    '--replay_checkpoint_period_s=1',
  )
  retained = run_dir / 'checkpoints' / 'replay_server_0' / 'retained'
  step = lambda: binaries.last(run_dir, 'learner', 'learner_step', 0)
  evaluated = lambda: binaries.last(run_dir, 'evaluator', 'policy_version', 0)
  binaries.wait_until(evaluated, local, 90)
  binaries.wait_until(
    lambda: retained.exists() and any(retained.iterdir()), local
  )
  before = local.children()
  before['replay_server_0'].kill()
  binaries.wait_until(
    lambda: (
      'replay_server_0 died (killed by SIGKILL); restart in 1 s' in local.out
    ),
    local,
  )
  milestones = run_dir / 'milestones.jsonl'
  binaries.wait_until(lambda: 'restored' in milestones.read_text(), local)
  known_step, known_version = step(), evaluated()
  binaries.wait_until(lambda: step() > known_step + 20, local, 90)
  binaries.wait_until(lambda: evaluated() > known_version, local)

  after = local.children()
  server = before.pop('replay_server_0'), after.pop('replay_server_0')
  assert server[0].pid != server[1].pid
  assert {r: p.pid for r, p in after.items()} == {
    r: p.pid for r, p in before.items()
  }
  assert local.stop(signal.SIGINT) == 0, local.err
  assert local.err == ''
  summary = json.loads((run_dir / 'summary.json').read_text())
  assert summary['restarts'] == {'replay_server_0': 1}


def _last_version(run_dir):
  return binaries.last(run_dir, 'learner', 'policy_version')


# An environment that waits as long as its sleep says; found in the working
# directory.
_SLOW = """
import time
from tunix_reverb.environments import catch

class Slow(catch.Catch):
  def step(self, action):
    time.sleep(0.002)
    return super().step(action)

  step_raw = step

def make(*, seed):
  return Slow(seed=seed)
"""


def test_replay_mode_over_two_servers_with_slow_environments(start, tmp_path):
  (tmp_path / 'slow_catch.py').write_text(_SLOW)
  run_dir = tmp_path / 'run'
  local = start(
    'local',
    '--run_dir=run',
    '--environment=slow_catch:make',
    '--environment_mode=asynchronous',
    '--environments_per_actor=16',
    '--num_servers=2',
    '--replay_mode=replay',
    '--sampler=prioritised',
    '--samples_per_insert=2',
    '--samples_per_insert_tolerance=0.1',
    '--min_table_items=8',
    '--max_table_items=100',
    '--item_age_s=0.01',
    '--batch_positions=400',
    '--max_learner_steps=150',
    '--evaluation_period_s=0',
    '--seed=3',
  )
  assert local.wait(120) == 0, local.out + local.err
  assert 'learner completed' in local.out
  for server in ('replay_server_0', 'replay_server_1'):
    inserts = binaries.last(run_dir, server, 'inserts_total')
    samples = binaries.last(run_dir, server, 'samples_total')
    assert inserts >= 16
    # 2 * min_table_items, give or take 0.1 * 2 * max_table_items.
    assert 16 - 20 <= 2 * inserts - samples <= 16 + 20
    assert samples >= 32
  last = binaries.metrics(run_dir, 'learner')[-1]
  assert last['learner_step'] == 150
  # Each trajectory is learnt more than once, and both servers' are.
  learnt = binaries.last(run_dir, 'learner', 'transitions_total')
  acted = sum(
    binaries.last(run_dir, f'actor_{i}', 'actor_steps_total') for i in range(2)
  )
  assert learnt > 1.2 * acted
