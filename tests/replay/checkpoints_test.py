"""Retention, verification and staging of checkpoints, on files alone."""

import errno
import os

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.replay import checkpoints
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

_DESCRIPTION = tables.describe(tables.TableConfig(), test_utils.columns())


@pytest.fixture
def make_store(tmp_path, closing):
  """Opens the store in `tmp_path`, as each start of a server does."""
  stores = []

  def make(keep=2):
    for store in stores:
      store.close()
    stores.append(closing(checkpoints.CheckpointStore(tmp_path, keep=keep)))
    return stores[-1]

  return make


def _reverb_writes(store, number=1):
  """What Reverb's checkpointer leaves behind."""
  path = store.working / f'2026-01-0{number}T08:00:00.5+00:00'
  path.mkdir()
  (path / 'chunks.tfrecord').write_bytes(b'c' * 1000 + bytes([number]))
  (path / 'items.tfrecord').write_bytes(b'i' * 100)
  (path / 'DONE').write_bytes(b'')
  return path


def test_a_retained_checkpoint_can_be_staged_again(make_store):
  store = make_store()
  source = _reverb_writes(store)
  retained = store.retain(source, _DESCRIPTION)
  assert retained.name == '00000001'

  store = make_store()  # As after a restart.
  assert store.paths() == [retained]
  checkpoint = store.load(retained)
  assert checkpoint.description == _DESCRIPTION
  store.stage(checkpoint)
  (staged,) = store.working.iterdir()
  assert staged.name == source.name
  assert (staged / 'chunks.tfrecord').read_bytes() == b'c' * 1000 + b'\x01'
  assert (staged / 'DONE').exists()


def test_hard_links_take_no_space(make_store):
  store = make_store()
  source = _reverb_writes(store)
  retained = store.retain(source, _DESCRIPTION)
  ours = retained / source.name / 'chunks.tfrecord'
  assert ours.samefile(source / 'chunks.tfrecord')


def test_the_last_k_are_kept_and_foreign_files_stay(make_store, tmp_path):
  foreign = [
    tmp_path / 'notes.txt',
    tmp_path / 'weights' / 'model.bin',
    tmp_path / 'retained' / 'mine' / 'data',
    tmp_path / 'retained' / '123' / 'data',
  ]
  for path in foreign:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('keep')
  store = make_store(keep=2)
  for number in range(1, 6):
    source = _reverb_writes(store, number)
    store.retain(source, _DESCRIPTION)
  assert [p.name for p in store.paths()] == ['00000005', '00000004']
  assert all(path.read_text() == 'keep' for path in foreign)
  assert store.load(store.paths()[1]).reverb_name.startswith('2026-01-04')


def _truncate(data):
  path = data / 'chunks.tfrecord'
  path.write_bytes(path.read_bytes()[:-1])


def _flip_one_bit(data):
  path = data / 'chunks.tfrecord'
  content = bytearray(path.read_bytes())
  content[500] ^= 1
  path.write_bytes(content)


def _remove_file(data):
  (data / 'items.tfrecord').unlink()


def _cut_manifest(data):
  path = data.parent / 'manifest.json'
  path.write_text(path.read_text()[:40])


def _empty_manifest(data):
  (data.parent / 'manifest.json').write_text('{}')


@pytest.mark.parametrize(
  'damage',
  [_truncate, _flip_one_bit, _remove_file, _cut_manifest, _empty_manifest],
)
def test_damage_is_found_and_named(make_store, damage):
  store = make_store()
  source = _reverb_writes(store)
  retained = store.retain(source, _DESCRIPTION)
  damage(retained / source.name)
  with pytest.raises(checkpoints.DamagedCheckpointError, match='00000001'):
    store.load(retained)


@pytest.mark.parametrize('call', ['link', 'fsync'])
def test_a_full_disk_leaves_the_previous_one(make_store, monkeypatch, call):
  store = make_store()
  retained = store.retain(_reverb_writes(store, 1), _DESCRIPTION)

  def full(*_):
    raise OSError(errno.ENOSPC, 'No space left on device')

  source = _reverb_writes(store, 2)
  with monkeypatch.context() as patch:
    patch.setattr(os, call, full)
    with pytest.raises(OSError, match='No space left'):
      store.retain(source, _DESCRIPTION)
  assert store.paths() == [retained]
  assert list(retained.parent.iterdir()) == [retained]
  store.load(retained)
  store.retain(source, _DESCRIPTION)
  assert len(store.paths()) == 2


def test_file_systems_without_hard_links_get_copies(make_store, monkeypatch):
  def refuse(*_):
    raise OSError(errno.EPERM, 'Operation not permitted')

  monkeypatch.setattr(os, 'link', refuse)
  store = make_store()
  retained = store.retain(_reverb_writes(store), _DESCRIPTION)
  store.stage(store.load(retained))


def test_what_was_never_completed_is_removed_at_start(make_store, tmp_path):
  store = make_store()
  store.retain(_reverb_writes(store), _DESCRIPTION)
  incomplete = tmp_path / 'retained' / '.incomplete-00000002'
  incomplete.mkdir()
  (incomplete / 'chunks.tfrecord').write_bytes(b'half')
  store = make_store()
  assert not incomplete.exists()
  assert len(store.paths()) == 1
  assert not list(store.working.iterdir())


def test_half_of_a_checkpoint_by_reverb_frees_its_space(make_store):
  store = make_store()
  whole = _reverb_writes(store, 1)
  half = _reverb_writes(store, 2)
  (half / 'DONE').unlink()
  store.remove_incomplete()
  assert list(store.working.iterdir()) == [whole]


def test_foreign_files_in_reverbs_directory_are_refused(make_store, tmp_path):
  foreign = tmp_path / 'working' / 'model.bin'
  foreign.parent.mkdir()
  foreign.write_text('keep')
  with pytest.raises(errors.CheckpointError, match=r'model\.bin must not'):
    make_store()
  assert foreign.read_text() == 'keep'


def test_a_directory_in_use_is_refused(make_store, tmp_path):
  store = make_store()
  with pytest.raises(errors.CheckpointError, match='another one uses it'):
    checkpoints.CheckpointStore(tmp_path, keep=1)
  store.close()
  checkpoints.CheckpointStore(tmp_path, keep=1).close()


def test_an_unusable_directory_is_told(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.CheckpointError, match='must be writable'):
    checkpoints.CheckpointStore(tmp_path / 'file', keep=1)


def test_discarding_puts_checkpoints_aside(make_store):
  store = make_store()
  assert store.discard_all() is None
  for number in (1, 2):
    store.retain(_reverb_writes(store, number), _DESCRIPTION)
    aside = store.discard_all()
    assert store.paths() == []
    assert (aside / '00000001' / 'manifest.json').exists()
    assert aside.name == f'discarded-{number}'


def test_descriptions_survive_json_and_tell_differences():
  config = tables.TableConfig(mode='replay', sampler='prioritised')
  ours = tables.describe(config, test_utils.columns())
  assert tables.TableDescription.from_json(ours.to_json()) == ours
  assert tables.differences(ours, ours, 'it') == []
  lines = tables.differences(ours, _DESCRIPTION, 'the checkpoint')
  assert lines[0] == (
    'replay_mode: this run has replay, the checkpoint has queue'
  )
  theirs = tables.describe(
    tables.TableConfig(
      mode='replay', sampler='prioritised', samples_per_insert_tolerance=0.75
    ),
    test_utils.columns()._replace(core_state=()),
  )
  lines = tables.differences(ours, theirs, 'it')
  assert len(lines) == 2
  assert lines[0].startswith('samples_per_insert_tolerance: this run lets')
  assert lines[1].startswith('column core_state/0: this run has float32[?, 2]')


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [
    ({'mode': 'stack'}, "mode ('stack') must be one of queue, replay"),
    ({'max_items': 0}, 'max_items (0) must be > 0'),
    ({'max_items': 2, 'min_items': 3}, 'min_items (3) must be <= max_items'),
    ({'samples_per_insert': np.nan}, 'samples_per_insert (nan) must be > 0'),
  ],
)
def test_invalid_table_configs_are_refused(kwargs, message):
  with pytest.raises(ValueError) as raised:
    tables.TableConfig(**kwargs)
  assert message in str(raised.value)
