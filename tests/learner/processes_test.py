"""Two processes of four devices learn what one of eight does."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from launch import topology
from tunix_reverb.learner import checkpoints
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import processes

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import processes_worker as worker

_TIMEOUT_S = 90.0


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  """Where one process has saved a state, and two have learnt from it."""
  path = tmp_path_factory.mktemp('processes')
  checkpointer = checkpoints.LearnerCheckpointer(path / 'one', max_to_keep=1)
  checkpointer.save(0, worker.fresh_state((2, 2, 1, 2)), {})
  checkpointer.close(worker.TIMEOUT_S)
  port = topology.pick_free_ports(1)[0]
  env = dict(os.environ) | {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=4'
    ' --xla_cpu_multi_thread_eigen=false'
  }
  logs = [(path / f'log_{i}').open('w') for i in range(2)]
  started = [
    subprocess.Popen(
      [sys.executable, worker.__file__, str(i), str(port), str(path)],
      env=env,
      stdout=log,
      stderr=subprocess.STDOUT,
    )
    for i, log in enumerate(logs)
  ]
  try:
    statuses = [process.wait(_TIMEOUT_S) for process in started]
  finally:
    for process, log in zip(started, logs):
      process.kill()
      process.wait()
      log.close()
  said = ''.join((path / f'log_{i}').read_text()[-2000:] for i in range(2))
  assert statuses == [0, 0], said
  return path


def _close(ours, theirs, rtol):
  """Relative to the norm of the leaf: tiny entries cancel."""
  error = np.linalg.norm(np.asarray(ours) - theirs)
  return error <= rtol * np.linalg.norm(theirs)


def test_losses_gradients_and_params_are_those_of_one_process(directory):
  state = worker.fresh_state((1, 4, 1, 2))
  results, _ = worker.learn(state, (1, 4, 1, 2), mesh_lib.place_batch)
  theirs = worker.flat(results)
  ours = np.load(directory / 'results.npz')
  assert set(ours) == set(theirs)
  np.testing.assert_allclose(ours["['losses']"], theirs["['losses']"], 1e-5)
  far = [name for name in theirs if not _close(ours[name], theirs[name], 1e-5)]
  assert not far


def test_what_two_processes_save_one_restores(directory):
  ours = np.load(directory / 'results.npz')
  checkpointer = checkpoints.LearnerCheckpointer(
    directory / 'two', max_to_keep=1
  )
  state, metadata = checkpointer.restore_latest(worker.template((4, 1, 1, 2)))
  checkpointer.close(worker.TIMEOUT_S)
  assert metadata == {'step': 4}
  assert int(state.learner_step) == 3
  params = worker.flat({'params': jax.device_get(state.params)})
  for name, value in params.items():
    np.testing.assert_array_equal(value, ours[name])


class _Device:
  """As much of a device as a mesh looks at."""

  platform = 'cpu'

  def __init__(self, process_index, number):
    self.process_index, self.id = process_index, number


@pytest.mark.parametrize(
  'sizes, is_fine',
  [
    ((4, 1, 1, 1), True),
    ((1, 2, 2, 1), True),
    ((2, 1, 1, 2), True),
    ((1, 1, 2, 2), False),
    ((1, 1, 4, 1), False),
  ],
)
def test_rows_must_be_split_over_the_processes(sizes, is_fine, monkeypatch):
  monkeypatch.setattr(mesh_lib, 'has_ordered_gloo', lambda: True)
  devices = [_Device(i % 2, i) for i in range(4)]
  ordered = processes.by_process(devices)
  assert [d.process_index for d in ordered] == [0, 0, 1, 1]
  mesh = _Mesh(np.array(ordered).reshape(sizes))
  assert processes.num_processes(mesh) == 2
  if is_fine:
    processes.check_rows(mesh)
    return
  with pytest.raises(ValueError, match='must be a multiple of num_learners'):
    processes.check_rows(mesh)


def test_an_old_gloo_is_not_asked_for_params_of_other_processes(monkeypatch):
  monkeypatch.setattr(mesh_lib, 'has_ordered_gloo', lambda: False)
  devices = np.array([_Device(i // 2, i) for i in range(4)])
  processes.check_rows(_Mesh(devices.reshape(2, 2, 1, 1)))
  processes.check_rows(_Mesh(devices[:2].reshape(1, 2, 1, 1)))
  with pytest.raises(ValueError, match=r'data_axis \(1\) must be a multiple'):
    processes.check_rows(_Mesh(devices.reshape(1, 4, 1, 1)))


class _Mesh:
  def __init__(self, devices):
    self.devices = devices
    self.shape = dict(zip(mesh_lib.AXES, devices.shape))
