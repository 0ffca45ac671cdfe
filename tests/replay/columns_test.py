"""Between trajectories and lists of arrays; memory of layouts hides nothing."""

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import test_utils


@pytest.fixture
def codec():
  return columns_lib.ColumnCodec(test_utils.columns())


def _assert_equal(ours, theirs):
  ours, theirs = specs.flatten_columns(ours), specs.flatten_columns(theirs)
  assert ours.keys() == theirs.keys()
  for path, array in ours.items():
    np.testing.assert_array_equal(theirs[path], array, strict=True)


def test_turns_are_a_column_where_there_are_any():
  columns = test_utils.columns()._replace(
    turn_id=specs.ColumnSpec((None,), np.dtype(np.int32))
  )
  with_turns = columns_lib.ColumnCodec(columns)
  assert 'turn_id' in with_turns.paths
  turns = np.array([0, 1, 1, 0, 0, 2], np.int32)
  item = test_utils.item(lengths=(2, 4))._replace(turn_id=turns)
  for _ in range(2):
    _assert_equal(item, with_turns.read(with_turns.flatten(item)))
  with pytest.raises(errors.SpecMismatchError, match='turn_id'):
    with_turns.flatten(item._replace(turn_id=()))
  with pytest.raises(errors.SpecMismatchError, match='turn_id has 5 rows'):
    with_turns.read(with_turns.flatten(item._replace(turn_id=turns[:5])))


def test_advantages_are_a_column_where_there_are_any():
  columns = test_utils.columns()._replace(
    advantage=specs.ColumnSpec((None,), np.dtype(np.float32))
  )
  codec = columns_lib.ColumnCodec(columns)
  advantage = np.linspace(-1, 1, 6, dtype=np.float32)
  item = test_utils.item(lengths=(2, 4))._replace(advantage=advantage)
  _assert_equal(item, codec.read(codec.flatten(item)))
  with pytest.raises(errors.SpecMismatchError, match='advantage has 5 rows'):
    codec.read(codec.flatten(item._replace(advantage=advantage[:5])))


@pytest.mark.parametrize('lengths', [(1,), (3,), (2, 4), (1, 1, 1)])
def test_items_come_back(codec, lengths):
  item = test_utils.item(5, lengths=lengths)
  arrays = codec.flatten(item)
  assert codec.paths == sorted(codec.paths)
  _assert_equal(item, codec.unflatten(arrays))
  for _ in range(2):  # The second time from memory.
    _assert_equal(item, codec.read(arrays))


def test_a_known_layout_is_read_with_other_lengths_of_the_same_sum(codec):
  for lengths in [(2, 4), (5, 1), (2, 4)]:
    item = test_utils.item(lengths=lengths)
    _assert_equal(item, codec.read(codec.flatten(item)))


@pytest.mark.parametrize('lengths', [(0, 6), (-1, 7), (2, 3), (3, 4)])
def test_lengths_that_contradict_a_known_layout_are_refused(codec, lengths):
  item = test_utils.item(lengths=(2, 4))
  codec.read(codec.flatten(item))
  bad = item._replace(lengths=np.array(lengths, np.int32))
  for _ in range(2):
    with pytest.raises(errors.SpecMismatchError, match='lengths'):
      codec.read(codec.flatten(bad))


def test_other_dtypes_and_shapes_are_refused_whatever_is_known(codec):
  arrays = codec.flatten(test_utils.item())
  codec.read(arrays)
  for path, change in (
    ('reward', lambda a: a.astype(np.float64)),
    ('reward', lambda a: a[:-1]),
    ('observation/position', lambda a: a[:, :2]),
    ('lengths', lambda a: a[:0]),
    ('created_at_s', lambda a: a.view('>f8')),
  ):
    i = codec.paths.index(path)
    bad = [*arrays[:i], change(arrays[i]), *arrays[i + 1 :]]
    for _ in range(2):
      with pytest.raises(errors.SpecMismatchError, match=path):
        codec.read(bad)
  with pytest.raises(errors.SpecMismatchError, match='columns'):
    codec.read(arrays[:-1])


def test_memory_is_bounded(codec, monkeypatch):
  monkeypatch.setattr(columns_lib, '_MAX_LAYOUTS', 3)
  for length in range(1, 9):
    codec.read(codec.flatten(test_utils.item(lengths=(length,))))
    assert len(codec._transitions) <= 3


def test_what_is_missing_or_unknown_is_named(codec):
  item = test_utils.item()
  with pytest.raises(errors.SpecMismatchError, match='core_state/0'):
    codec.flatten(item._replace(core_state=()))
  observation = {'position': item.observation['position'], 'b': np.zeros(2)}
  with pytest.raises(errors.SpecMismatchError, match=r'a/flag.*observation/b'):
    codec.flatten(item._replace(observation=observation))
