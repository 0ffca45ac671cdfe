"""Checkpoints of real servers: what comes back, and what is refused."""

import json
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

pytestmark = [pytest.mark.replay, pytest.mark.timeout(60)]

_COLUMNS = test_utils.columns()


def _write(server, ids, closing):
  writer = closing(clients.make_writer(server.address, columns=_COLUMNS), 0.0)
  for i in ids:
    assert writer.write(test_utils.item(i), 10.0)
  assert writer.close(10.0)


def _read_all(server, closing):
  sampler = closing(clients.make_sampler([server.address], columns=_COLUMNS))
  ids = []
  while (sampled := sampler.sample(0.5)) is not None:
    ids.append(int(sampled.trajectories.episode_id[0]))
  return ids


def test_items_and_variables_come_back_and_the_queue_goes_on(
  start_server, closing, tmp_path
):
  server = start_server(checkpoint_dir=tmp_path)
  assert server.restored_from is None
  _write(server, range(4), closing)
  sink = closing(clients.make_variable_sink(server.address))
  sink.publish(types.Variables(7, {'w': np.arange(3)}), 10.0)
  sink.close()
  retained = server.checkpoint(20.0)
  server.stop(20.0)

  server = start_server(checkpoint_dir=tmp_path)
  assert server.restored_from == retained
  source = closing(clients.make_variable_source(server.address))
  assert source.get_variables(7, 10.0).policy_version == 7
  state = clients.limiter_state(server.address, 5.0)[tables.TRAJECTORIES]
  assert state.current_size == 4 and not state.can_insert
  writer = closing(clients.make_writer(server.address, columns=_COLUMNS), 0.0)
  sent = 4
  while writer.write(test_utils.item(sent), 0.3):
    sent += 1
  assert sent <= 8
  assert _read_all(server, closing) == list(range(sent))
  # Balanced again: as much room as an empty queue of this size has.
  assert all(writer.write(test_utils.item(i), 10.0) for i in range(4))


def test_a_restored_ratio_goes_on_where_it_was(start_server, closing, tmp_path):
  """Restored limiters have been known to block both sides for ever."""
  config = tables.TableConfig(
    mode='replay',
    max_items=4,
    min_items=2,
    samples_per_insert=2.0,
    samples_per_insert_tolerance=0.25,
  )

  def exchange(server, num_samples):
    writer = closing(clients.make_writer(server.address, columns=_COLUMNS), 0.0)
    sampler = closing(clients.make_sampler([server.address], columns=_COLUMNS))
    deadline_s = time.monotonic() + 20.0
    sampled = 0
    while sampled < num_samples:
      assert time.monotonic() < deadline_s
      writer.write(test_utils.item(), 0.0)
      sampled += sampler.sample(0.01) is not None

  server = start_server(config, checkpoint_dir=tmp_path)
  exchange(server, 30)
  server.checkpoint(20.0)
  before = clients.limiter_state(server.address, 5.0)[tables.TRAJECTORIES]
  server.stop(20.0)
  server = start_server(config, checkpoint_dir=tmp_path)
  state = clients.limiter_state(server.address, 5.0)[tables.TRAJECTORIES]
  assert state.current_size == before.current_size == 4
  assert state.samples_completed >= 30
  exchange(server, 60)
  state = clients.limiter_state(server.address, 5.0)[tables.TRAJECTORIES]
  assert state.samples_completed >= 90
  error = state.inserts_completed * 2.0 - state.samples_completed
  assert 2.0 <= error <= 6.0


def test_only_the_last_k_are_kept_and_each_can_be_loaded(
  start_server, closing, tmp_path
):
  foreign = tmp_path / 'weights' / 'model.bin'
  foreign.parent.mkdir()
  foreign.write_text('keep')
  server = start_server(checkpoint_dir=tmp_path, checkpoints_to_keep=2)
  paths = []
  for i in range(3):
    _write(server, [i], closing)
    paths.append(server.checkpoint(20.0))
  server.stop(20.0)
  assert [p.exists() for p in paths] == [False, True, True]
  assert foreign.read_text() == 'keep'

  (paths[2] / 'manifest.json').unlink()
  server = start_server(checkpoint_dir=tmp_path)
  assert server.restored_from == paths[1]
  assert _read_all(server, closing) == [0, 1]


def _two_checkpoints(start_server, closing, tmp_path):
  server = start_server(checkpoint_dir=tmp_path)
  paths = []
  for i in range(2):
    _write(server, [i], closing)
    paths.append(server.checkpoint(20.0))
  server.stop(20.0)
  return paths


def _corrupt(retained, *, fix_manifest):
  """Damages the chunks; with `fix_manifest`, so that only Reverb can tell."""
  manifest = json.loads((retained / 'manifest.json').read_text())
  chunks = retained / manifest['reverb_name'] / 'chunks.tfrecord'
  content = bytearray(chunks.read_bytes())
  content[len(content) // 2] ^= 0xFF
  chunks.unlink()  # The file is a hard link: leave the other names alone.
  chunks.write_bytes(content)
  if fix_manifest:
    manifest['files'][chunks.name] = [len(content), zlib.crc32(content)]
    (retained / 'manifest.json').write_text(json.dumps(manifest))


@pytest.mark.parametrize('fix_manifest', [False, True])
def test_a_damaged_latest_falls_back_to_the_one_before(
  start_server, closing, tmp_path, caplog, fix_manifest
):
  before, latest = _two_checkpoints(start_server, closing, tmp_path)
  _corrupt(latest, fix_manifest=fix_manifest)
  server = start_server(checkpoint_dir=tmp_path)
  assert server.restored_from == before
  assert _read_all(server, closing) == [0]
  assert sum('fell back' in r.getMessage() for r in caplog.records) == 1
  # The next checkpoint works and becomes the newest.
  assert server.checkpoint(20.0) > latest


def test_nothing_usable_is_one_error_that_says_why(
  start_server, closing, tmp_path
):
  paths = _two_checkpoints(start_server, closing, tmp_path)
  for path, fix_manifest in zip(paths, (False, True)):
    _corrupt(path, fix_manifest=fix_manifest)
  with pytest.raises(errors.CheckpointError) as raised:
    start_server(checkpoint_dir=tmp_path)
  message = str(raised.value)
  assert all(str(path) in message for path in paths)
  assert 'wrong checksum' in message
  assert '--replay_restore=discard' in message
  server = start_server(checkpoint_dir=tmp_path, restore=False)
  assert server.restored_from is None
  assert all((tmp_path / 'discarded-1' / p.name).exists() for p in paths)


def test_a_checkpoint_of_another_table_is_refused_with_the_differences(
  start_server, closing, tmp_path
):
  _two_checkpoints(start_server, closing, tmp_path)
  columns = _COLUMNS._replace(action=specs.ColumnSpec((None, 2), np.float32))
  with pytest.raises(errors.SpecMismatchError) as raised:
    start_server(
      tables.TableConfig(max_items=8), columns=columns, checkpoint_dir=tmp_path
    )
  message = str(raised.value)
  assert 'max_table_items: this run has 8, the checkpoint has 4' in message
  assert 'column action: this run has float32[?, 2]' in message
  assert '--replay_restore=discard' in message
  # Refusing changed nothing: the old values still restore it.
  assert start_server(checkpoint_dir=tmp_path).restored_from is not None


def test_without_a_directory_there_is_no_checkpoint(start_server):
  with pytest.raises(errors.CheckpointError, match='checkpoint_dir'):
    start_server().checkpoint(1.0)


_FULL_DISK = """
import os, pathlib, resource, sys, time
from tunix_reverb import errors
from tunix_reverb.replay import clients, tables, test_utils

server = clients.make_server(
  config=tables.TableConfig(max_items=8), columns=test_utils.columns(),
  port=0, checkpoint_dir=pathlib.Path(sys.argv[1]))
writer = clients.make_writer(server.address, columns=test_utils.columns())
assert writer.write(test_utils.item(1), 10.0)
while writer.unconfirmed_items: time.sleep(0.01)
good = server.checkpoint(20.0)
assert writer.write(test_utils.item(2, lengths=(20000,)), 10.0)
while writer.unconfirmed_items: time.sleep(0.01)
# No file may grow beyond this: writing fails as on a full disk.
soft = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, soft[1]))
try:
  server.checkpoint(20.0)
except errors.CheckpointError as e:
  print(e)
else:
  sys.exit('no error')
retained = sorted(p.name for p in good.parent.iterdir())
assert retained == [good.name], retained
print(*(p.name for p in (good.parent.parent / 'working').iterdir()))
assert writer.write(test_utils.item(3), 10.0)
while writer.unconfirmed_items: time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, soft)
print(server.checkpoint(20.0).name)
sys.stdout.flush()
os._exit(0)
"""


def test_a_full_disk_is_one_error_and_serving_goes_on(
  start_server, closing, tmp_path
):
  result = subprocess.run(
    [sys.executable, '-c', _FULL_DISK, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  assert 'could not be written' in result.stdout
  assert 'Those retained before are untouched' in result.stdout
  assert '00000002' in result.stdout
  server = start_server(
    tables.TableConfig(max_items=8), checkpoint_dir=tmp_path
  )
  assert _read_all(server, closing) == [1, 2, 3]


def test_a_full_disk_in_reverbs_words_is_the_same_error(
  start_server, tmp_path, monkeypatch
):
  """Reverb raises IndexError for it."""
  from tunix_reverb.replay.reverb_client import connection

  class FullDisk:
    def Checkpoint(self):
      raise IndexError('chunks.tfrecord; No space left on device')

  server = start_server(checkpoint_dir=tmp_path)
  with monkeypatch.context() as patch:
    patch.setattr(connection, 'connect', lambda _: FullDisk())
    with pytest.raises(errors.CheckpointError, match='No space left'):
      server.checkpoint(10.0)
  assert server.checkpoint(10.0).exists()
