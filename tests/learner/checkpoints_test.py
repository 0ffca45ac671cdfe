"""Checkpoints: bit-exact, atomic, verified, and never in training's way."""

import json
import resource
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.learner import checkpoints

_TIMEOUT_S = 60.0


def _state(seed=0):
  key = jax.random.PRNGKey(seed)
  return {
    'params': {
      'kernel': jax.random.normal(key, (40, 30)),
      'bias': jnp.zeros(3),
    },
    'optimiser': (jnp.int32(seed), jax.random.normal(key, (7,))),
    'key': key,
  }


@pytest.fixture
def open_checkpointer(tmp_path):
  """Opens checkpointers on one directory; closes them at the end."""
  opened = []

  def open_one(max_to_keep=3):
    opened.append(
      checkpoints.LearnerCheckpointer(
        tmp_path / 'learner', max_to_keep=max_to_keep
      )
    )
    return opened[-1]

  yield open_one
  for checkpointer in opened:
    checkpointer.close(_TIMEOUT_S)


def _save(checkpointer, *steps):
  for step in steps:
    assert checkpointer.save(step, _state(step), {'policy_version': step})
    checkpointer.wait(_TIMEOUT_S)


def _assert_equal(a, b):
  jax.tree_util.tree_map(np.testing.assert_array_equal, a, b)


def test_restores_bit_for_bit(open_checkpointer):
  saver = open_checkpointer()
  metadata = {'policy_version': 7, 'config': {'seed': 1, 'names': ['a', 'b']}}
  assert saver.save(5, _state(5), metadata)
  saver.wait(_TIMEOUT_S)
  state, restored = open_checkpointer().restore_latest(_state(0))
  _assert_equal(state, _state(5))
  assert restored == metadata
  assert open_checkpointer().latest_metadata() == metadata


def test_restores_into_an_abstract_template_on_a_mesh(open_checkpointer):
  _save(open_checkpointer(), 1)
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ('data',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  template = jax.tree_util.tree_map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    _state(0),
  )
  state, _ = open_checkpointer().restore_latest(template)
  _assert_equal(state, _state(1))
  assert state['params']['bias'].sharding == sharding


def test_keeps_the_newest(open_checkpointer, tmp_path):
  checkpointer = open_checkpointer(max_to_keep=2)
  _save(checkpointer, 2, 9, 10, 11)
  assert checkpointer.steps() == [10, 11]
  assert sorted(p.name for p in (tmp_path / 'learner').iterdir()) == [
    '10',
    '11',
  ]


def test_state_may_be_donated_right_after_save(open_checkpointer):
  checkpointer = open_checkpointer()
  state = jax.device_put(_state(1))
  expected = jax.device_get(state)
  checkpointer.save(1, state, {})
  jax.tree_util.tree_map(lambda x: x.delete(), state)
  checkpointer.wait(_TIMEOUT_S)
  _assert_equal(checkpointer.restore_latest(_state(0))[0], expected)


def _files(path):
  return sorted(p for p in path.rglob('*') if p.is_file())


@pytest.mark.parametrize('damage', ['truncate', 'delete', 'flip', 'unseal'])
def test_damaged_latest_falls_back(open_checkpointer, tmp_path, damage):
  """Every single file of the newest checkpoint, damaged one at a time."""
  saver = open_checkpointer()
  _save(saver, 1, 2)
  path = tmp_path / 'learner' / '2'
  files = _files(path)
  assert len(files) > 5
  if damage == 'unseal':
    files = [path / 'checksums.json']
  for file in files:
    content = file.read_bytes()
    if damage == 'truncate':
      file.write_bytes(content[: len(content) // 2])
    elif damage == 'flip' and file.name != 'checksums.json':
      middle = len(content) // 2
      flipped = bytes([content[middle] ^ 1])
      file.write_bytes(content[:middle] + flipped + content[middle + 1 :])
    else:
      file.unlink()
    state, metadata = saver.restore_latest(_state(0))
    assert metadata == {'policy_version': 1}, file
    _assert_equal(state, _state(1))
    file.write_bytes(content)
  assert saver.restore_latest(_state(0))[1] == {'policy_version': 2}


def test_training_goes_on_after_a_fall_back(open_checkpointer, tmp_path):
  _save(open_checkpointer(), 1, 5, 9)
  for file in _files(tmp_path / 'learner' / '9'):
    file.write_bytes(b'')
  checkpointer = open_checkpointer(max_to_keep=2)
  assert checkpointer.restore_latest(_state(0))[1]['policy_version'] == 5
  _save(checkpointer, 6)
  assert checkpointer.steps() == [5, 6]
  _save(checkpointer, 9)
  assert checkpointer.restore_latest(_state(0))[1]['policy_version'] == 9


def test_names_all_that_was_tried(open_checkpointer, tmp_path):
  checkpointer = open_checkpointer()
  with pytest.raises(errors.CheckpointError, match='no checkpoint in'):
    checkpointer.restore_latest(_state(0))
  _save(checkpointer, 3, 4)
  (tmp_path / 'learner' / '3' / 'metadata' / 'metadata').unlink()
  (tmp_path / 'learner' / '4' / 'checksums.json').unlink()
  with pytest.raises(errors.CheckpointError) as e:
    checkpointer.restore_latest(_state(0))
  assert '4 (incomplete' in str(e.value)
  assert '3 (metadata/metadata is absent)' in str(e.value)


def test_refuses_a_template_of_another_shape(open_checkpointer):
  checkpointer = open_checkpointer()
  _save(checkpointer, 1)
  template = _state(0)
  template['params']['kernel'] = jnp.zeros((40, 31))
  difference = (
    r'tried 1 \(1 arrays differ .* '
    r"\['params'\]\['kernel'\]: float32\[40, 30\] saved, "
    r'float32\[40, 31\] wanted'
  )
  with pytest.raises(errors.CheckpointError, match=difference):
    checkpointer.restore_latest(template)


def test_full_disk_is_told_and_training_can_go_on(open_checkpointer):
  """A file size limit stands in for a full disk: writes fail half way."""
  checkpointer = open_checkpointer()
  _save(checkpointer, 1)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  big = {'x': jax.random.normal(jax.random.PRNGKey(0), (500, 500))}
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    with pytest.raises(errors.CheckpointError, match='could not be written'):
      checkpointer.save(2, big, {})
      checkpointer.wait(_TIMEOUT_S)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert checkpointer.steps() == [1]
  _save(checkpointer, 3)
  assert checkpointer.steps() == [1, 3]
  assert checkpointer.restore_latest(_state(0))[1]['policy_version'] == 3


def test_unwritable_directory_is_told(tmp_path):
  (tmp_path / 'file').write_text('')
  checkpointer = checkpoints.LearnerCheckpointer(
    tmp_path / 'file' / 'learner', max_to_keep=1
  )
  with pytest.raises(errors.CheckpointError, match='could not be written'):
    checkpointer.save(1, _state(1), {})
  checkpointer.close(_TIMEOUT_S)


def test_save_returns_before_the_files_are_written(
  open_checkpointer, monkeypatch
):
  """Training waits for the copy off the device only; `wait` has a deadline."""
  checkpointer = open_checkpointer()
  may_seal = threading.Event()
  seal = checkpoints._seal

  def held_seal(path):
    may_seal.wait(_TIMEOUT_S)
    seal(path)

  monkeypatch.setattr(checkpoints, '_seal', held_seal)
  assert checkpointer.save(1, _state(1), {})
  assert not checkpointer.save(2, _state(2), {})
  with pytest.raises(errors.DeadlineExceededError, match='checkpointer waited'):
    checkpointer.wait(0.01)
  assert checkpointer.steps() == []
  may_seal.set()
  checkpointer.wait(_TIMEOUT_S)
  assert checkpointer.steps() == [1]
  assert not checkpointer.save(1, _state(1), {})


_KILLED = textwrap.dedent("""
    import os, sys
    import jax.numpy as jnp
    from tunix_reverb.learner import checkpoints

    checkpointer = checkpoints.LearnerCheckpointer(sys.argv[1], max_to_keep=3)
    checkpointer.save(1, {'x': jnp.arange(4)}, {'policy_version': 1})
    checkpointer.wait(60)
    checkpoints._seal = lambda path: os.kill(os.getpid(), 9)
    checkpointer.save(2, {'x': jnp.arange(4) + 1}, {'policy_version': 2})
    checkpointer.wait(60)
""")


def test_killed_while_saving_leaves_the_one_before(tmp_path, subprocess_env):
  result = subprocess.run(
    [sys.executable, '-c', _KILLED, str(tmp_path / 'learner')],
    env=subprocess_env,
    timeout=100,
    check=False,
  )
  assert result.returncode == -9
  checkpointer = checkpoints.LearnerCheckpointer(
    tmp_path / 'learner', max_to_keep=3
  )
  state, metadata = checkpointer.restore_latest({'x': jnp.zeros(4, jnp.int32)})
  assert metadata == {'policy_version': 1}
  np.testing.assert_array_equal(state['x'], np.arange(4))
  assert checkpointer.save(2, {'x': jnp.arange(4)}, {})
  checkpointer.close(_TIMEOUT_S)
  assert checkpointer.steps() == [1, 2]


_TRAIN = textwrap.dedent("""
    import sys
    from dm_env import specs as dm_specs
    import jax
    import numpy as np
    from tunix_reverb import specs, types
    from tunix_reverb.learner import (
        checkpoints, objectives, optimiser, update)
    from tunix_reverb.networks import policy_network
    from tunix_reverb.sharding import mesh as mesh_lib

    directory, first, last, mode = sys.argv[1:]
    network = policy_network.make_policy_network(
        specs.EnvironmentSpec(
            dm_specs.Array((4,), np.float32), dm_specs.DiscreteArray(2),
            dm_specs.Array((), np.float32),
            dm_specs.BoundedArray((), np.float32, 0, 1)),
        hidden_sizes=(8,), core='gru', core_size=4)
    adam = optimiser.make_optimiser(
        learning_rate=1e-2, learning_rate_end=0.0, decay_steps=20,
        max_grad_norm=1.0)
    mesh = mesh_lib.make_mesh(jax.devices()[:1], data=1)
    objective = objectives.policy_objective(network, objectives.LossConfig())
    step_fn = update.make_update(objective, adam, mesh)
    checkpointer = checkpoints.LearnerCheckpointer(directory, max_to_keep=2)
    state = update.init_state(objective, adam, mesh, key=jax.random.PRNGKey(0))
    if mode == 'resume':
      state, metadata = checkpointer.restore_latest(state)
      assert metadata == {'step': int(first)}
    for i in range(int(first), int(last)):
      rng = np.random.default_rng(i)
      normal = lambda *s: rng.normal(size=s).astype(np.float32)
      ids = np.ones((4, 6), np.int32)
      batch = types.Batch(
          normal(4, 6, 4), rng.integers(0, 2, (4, 6)).astype(np.uint8),
          normal(4, 6), np.ones((4, 6), np.float32), normal(4, 6) - 1, ids,
          ids > 0, ids, np.tile(np.arange(6, dtype=np.int32), (4, 1)),
          {'hidden': normal(4, 1, 4)})
      state, _ = step_fn(state, mesh_lib.place_batch(batch, mesh))
    checkpointer.save(int(last), state, {'step': int(last)})
    checkpointer.close(60)
    leaves = [np.asarray(x).tobytes().hex()
              for x in jax.tree_util.tree_leaves(state)]
    print('|'.join(leaves))
""")


def test_resume_in_a_fresh_process_is_bit_exact(tmp_path, subprocess_env):
  """10 steps straight equal 5, a checkpoint, a new process, and 5 more."""

  def train(directory, first, last, mode):
    return subprocess.run(
      [
        sys.executable,
        '-c',
        _TRAIN,
        str(tmp_path / directory),
        str(first),
        str(last),
        mode,
      ],
      env=subprocess_env,
      timeout=100,
      check=True,
      capture_output=True,
      text=True,
    ).stdout

  straight = train('straight', 0, 10, 'fresh')
  train('resumed', 0, 5, 'fresh')
  resumed = train('resumed', 5, 10, 'resume')
  assert len(straight) > 1000 and straight == resumed


def test_seal_is_readable_json(open_checkpointer, tmp_path):
  _save(open_checkpointer(), 1)
  path = tmp_path / 'learner' / '1'
  sums = json.loads((path / 'checksums.json').read_text())
  names = {str(p.relative_to(path)) for p in _files(path)}
  assert set(sums) == names - {'checksums.json'}


def test_refuses_to_keep_none(tmp_path):
  with pytest.raises(ValueError, match=r'max_to_keep \(0\) must be >= 1'):
    checkpoints.LearnerCheckpointer(tmp_path, max_to_keep=0)
