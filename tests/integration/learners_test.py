"""A learner of two processes, on a live server: to its end, and a lost one."""

import json
import signal

import binaries
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

_RUN = (
  '--agent=transformer',
  '--environment=tool:reverse/3',
  '--num_actors=1',
  '--environments_per_actor=64',
  '--trajectory_length=7',
  '--bucket_lengths=16,32',
  '--batch_positions=512',
  '--evaluation_period_s=0',
  '--num_learners=2',
  '--virtual_devices=2',
)


def test_a_learner_process_alone_needs_to_be_told_where_the_others_are(refused):
  servers = '--replay_servers=localhost:1'
  line = refused('learner', *_RUN, servers)
  assert 'coordinator_address (none) must be host:port' in line
  line = refused('learner', *_RUN, servers, '--learner_index=2')
  assert 'learner_index (2) must be >= 0 and < num_learners (2)' in line


@pytest.mark.slow
def test_a_lost_process_restarts_both_from_the_checkpoint(start, tmp_path):
  run_dir = tmp_path / 'run'
  local = start(
    'local',
    *_RUN,
    '--run_dir=run',
    '--fsdp_axis=2',
    '--learner_checkpoint_period_s=2',
    '--max_learner_steps=200',
  )
  saved = lambda: sorted(run_dir.glob('checkpoints/learner/*/checksums.json'))
  binaries.wait_until(saved, local, 120)
  local.children()['learner_1'].send_signal(signal.SIGKILL)
  binaries.wait_until(lambda: 'restart of group' in local.out, local, 20)
  assert local.wait(200) == 0, local.out + local.err
  log = (run_dir / 'logs' / 'learner.log').read_text()
  assert 'resumed from learner step' in log
  summary = json.loads((run_dir / 'summary.json').read_text())
  assert summary['learner_step'] == 200
  assert summary['recompiles_total'] == 0
  assert summary['restarts'] == {'learner': 1, 'learner_1': 1}
  # Each process packs half of the rows; the first one tells of all.
  (last,) = binaries.metrics(run_dir, 'learner_1')[-1:]
  assert 'loss' not in last and 'dropped_shutdown_total' in last


@pytest.mark.slow
def test_without_a_supervisor_a_lost_process_ends_the_other_one(
  start, port, tmp_path
):
  server = start('replay_server', *_RUN, f'--port={port}')
  servers = f'--replay_servers=localhost:{port}'
  address = f'--coordinator_address=localhost:{port + 1}'
  first, second = (
    start('learner', *_RUN, servers, address, f'--learner_index={i}')
    for i in range(2)
  )
  start('actor', *_RUN, servers)
  binaries.wait_until(lambda: 'learnt its first batch' in first.out, first, 120)
  second.stop(signal.SIGKILL)
  assert first.wait(60) == 1
  assert 'error: learner: process 0 of 2' in first.err
  assert 'has died' in first.err
  assert 'Traceback' not in first.err
  assert server.status is None
