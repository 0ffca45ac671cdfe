"""Each role on its own: signals, disagreement, damage, and a full disk."""

import contextlib
import re
import signal

import binaries
import pytest

from tunix_reverb.agents import config as config_lib
from tunix_reverb.telemetry import reader

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def _retained(run_dir):
  directory = run_dir / 'checkpoints' / 'replay_server_0' / 'retained'
  return sorted(p for p in directory.glob('*') if p.name.isdigit())


def _learnt(run_dir):
  """Complete learner checkpoints, oldest first."""
  directory = run_dir / 'checkpoints' / 'learner'
  seals = directory.glob('*/checksums.json')
  return sorted((p.parent for p in seals), key=lambda p: int(p.name))


def test_a_server_its_clients_and_their_checkpoints(
  start, refused, port, tmp_path
):
  run_dir = tmp_path / 'run'
  server_flags = ('replay_server', '--run_dir=run', f'--port={port}')
  servers = f'--replay_servers=localhost:{port}'
  small = ('--environments_per_actor=4', '--learner_checkpoint_period_s=0.5')

  server = start(*server_flags, '--replay_checkpoint_period_s=1')
  binaries.wait_until(lambda: f'serves on port {port}' in server.out, server)
  assert f'port ({port}) must be free' in refused(*server_flags)

  actor = start('actor', '--run_dir=run', servers, *small)
  learner = start('learner', '--run_dir=run', servers, *small)
  binaries.wait_until(lambda: len(_learnt(run_dir)) >= 3, learner, 90)
  binaries.wait_until(lambda: len(_retained(run_dir)) >= 2, server)

  # What the roles disagree about is named, by its flag or its column.
  line = refused('actor', servers, '--environment=gym:CartPole-v1')
  assert 'observation: ' in line and str(port) in line
  line = refused('learner', servers, '--max_table_items=5')
  served = config_lib.ReplayConfig().max_table_items
  assert f'max_table_items: this run has 5, the server has {served}' in line

  assert learner.stop(signal.SIGTERM) == 0, learner.err
  (step,) = re.findall(r'learner: saved learner step (\d+)', learner.out)
  assert _learnt(run_dir)[-1].name == step
  assert actor.stop() == 0, actor.err
  before = _retained(run_dir)[-1]
  assert server.stop() == 0, server.err
  assert _retained(run_dir)[-1] > before
  items = binaries.last(run_dir, 'replay_server_0', 'table_items')

  # A damaged checkpoint falls back to the one before.
  newest, older = _retained(run_dir)[-1], _retained(run_dir)[-2]
  binaries.damage(newest)
  server = start(*server_flags)
  binaries.wait_until(lambda: 'restored' in server.out, server)
  assert f'restored {older}' in server.out
  assert f'fell back to replay checkpoint {older}' in server.err
  binaries.wait_until(
    lambda: binaries.last(run_dir, 'replay_server_0', 'table_items') == items,
    server,
  )
  assert server.stop() == 0
  for path in _retained(run_dir):
    binaries.damage(path)
  line = refused(*server_flags)
  assert 'no replay checkpoint' in line and '--replay_restore=discard' in line
  server = start(*server_flags, '--replay_restore=discard')
  binaries.wait_until(lambda: 'serves on port' in server.out, server)
  directory = run_dir / 'checkpoints' / 'replay_server_0'
  assert len(list((directory / 'discarded-1').iterdir())) >= 2

  _check_damaged_learner_checkpoints(start, refused, run_dir, servers)
  assert server.stop() == 0


def _check_damaged_learner_checkpoints(start, refused, run_dir, servers):
  newest, older = _learnt(run_dir)[-1], _learnt(run_dir)[-2]
  binaries.damage(newest)
  evaluate = (
    'evaluator',
    '--checkpoint=run',
    '--evaluation_episodes=2',
    '--environments_per_actor=4',
  )
  evaluator = start(*evaluate)
  assert evaluator.wait(60) == 0, evaluator.err
  assert f'Fell back to checkpoint {older}' in evaluator.err
  assert 'over 2 episodes' in evaluator.out
  for path in _learnt(run_dir)[:-1]:
    binaries.damage(path)
  line = refused('learner', '--run_dir=run', servers)
  assert 'can be loaded; tried ' in line and newest.name in line
  assert 'can be loaded; tried ' in refused(*evaluate)


def test_an_unknown_environment_ends_local_with_the_roles_own_words(
  refused, tmp_path
):
  line = refused('local', '--environment=cath', '--run_dir=run')
  assert 'did you mean catch' in line
  assert not (tmp_path / 'run').exists()  # The next try needs no --resume.


def test_a_missing_extra_is_named(refused, subprocess_env, tmp_path):
  (tmp_path / 'without').mkdir()
  (tmp_path / 'without' / 'sitecustomize.py').write_text(
    'import sys\nsys.modules["gymnasium"] = None\n'
  )
  path = subprocess_env.get('PYTHONPATH', '')
  env = {'PYTHONPATH': f'{tmp_path / "without"}:{path}'.rstrip(':')}
  line = refused('check_environment', '--environment=gym:CartPole-v1', env=env)
  assert 'tunix_reverb[gym]' in line


def test_a_full_disk_is_told_and_training_goes_on(start, small_disk):
  run_dir = small_disk / 'run'
  local = start(
    'local',
    f'--run_dir={run_dir}',
    '--environments_per_actor=4',
    '--num_actors=1',
    '--evaluation_period_s=0',
    '--learner_checkpoint_period_s=1',
    '--replay_checkpoint_period_s=2',
  )
  binaries.wait_until(lambda: _newest_step(run_dir), local, 90)
  fill = small_disk / 'filler'
  step = lambda: _newest_step(run_dir)
  children = local.children()
  busy_s = lambda: sum(children['learner'].cpu_times()[:2])

  _fill(fill)
  # Checkpoints, metrics and logs all fail meanwhile.
  full_step, until_s = step(), busy_s() + 1.5
  binaries.wait_until(lambda: busy_s() > until_s, local)
  fill.unlink()
  binaries.wait_until(lambda: step() > full_step + 20, local)
  binaries.wait_until(lambda: _learnt(run_dir), local)
  assert local.children().keys() == children.keys()
  assert all(c.is_running() for c in children.values())

  _fill(fill)
  assert local.stop(signal.SIGINT) == 1, local.out
  binaries.wait_gone(children.values())
  lines = local.err.splitlines()
  # Of the learner or the server: what one frees, the other may take.
  assert [line for line in lines if re.match(r'error: \w+ ended', line)]
  assert 'no space' in local.err.lower()
  assert 'Traceback' not in local.out + local.err


def _newest_step(run_dir):
  """Of the learner, by whatever lines of its metrics are complete."""
  rows = reader.Reader(run_dir).poll()
  return max((row.step for row in rows if row.role == 'learner'), default=0)


def _fill(path):
  """Leaves no room on the device of `path`."""
  with path.open('wb', buffering=0) as file, contextlib.suppress(OSError):
    while True:
      file.write(bytes(4096))


@pytest.mark.parametrize(('flags', 'status'), [((), 0), (('--supervised',), 4)])
def test_a_learner_told_to_stop_while_it_starts(start, flags, status):
  """Status 0, but for a supervisor, to which 0 says that all is learnt."""
  learner = start('learner', '--replay_servers=localhost:1', *flags)
  binaries.wait_until(lambda: 'compiled 1 buckets' in learner.out, learner)
  assert learner.stop() == status, learner.err
