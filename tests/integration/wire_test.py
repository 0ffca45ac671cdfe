"""Roles with the wire client, where dm-reverb and TensorFlow cannot be had."""

import binaries
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

_SMALL = (
  '--environments_per_actor=4',
  '--evaluation_episodes=4',
  '--batch_positions=400',
)


@pytest.fixture
def without_reverb(subprocess_env, tmp_path):
  """An environment in which importing either of them fails."""
  (tmp_path / 'without').mkdir()
  (tmp_path / 'without' / 'sitecustomize.py').write_text(
    'import sys\nsys.modules["reverb"] = sys.modules["tensorflow"] = None\n'
  )
  path = subprocess_env.get('PYTHONPATH', '')
  return {'PYTHONPATH': f'{tmp_path / "without"}:{path}'.rstrip(':')}


def test_every_role_but_the_server_runs_without_dm_reverb(
  start, refused, port, tmp_path, without_reverb
):
  servers = f'--replay_servers=localhost:{port}'
  server = start('replay_server', '--run_dir=run', f'--port={port}')
  binaries.wait_until(lambda: f'serves on port {port}' in server.out, server)

  wire = ('--run_dir=run', servers, '--replay_client=wire', *_SMALL)
  actor = start('actor', *wire, env=without_reverb)
  evaluator = start('evaluator', *wire, env=without_reverb)
  learner = start(
    'learner', *wire, '--max_learner_steps=20', env=without_reverb
  )
  run_dir = tmp_path / 'run'
  assert learner.wait(120) == 0, learner.err
  binaries.wait_until(lambda: binaries.metrics(run_dir, 'evaluator'), evaluator)
  for role in (actor, evaluator):
    assert role.stop() == 0, role.err
  assert server.stop() == 0, server.err

  line = refused(
    'actor', servers, '--replay_client=official', env=without_reverb
  )
  assert 'tunix_reverb[reverb]' in line and '--replay_client' in line
