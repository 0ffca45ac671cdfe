"""What a sweeper knows of entries, and what it makes of it."""

import numpy as np
import pytest

from tunix_reverb.replay import entries
from tunix_reverb.replay import entry_set
from tunix_reverb.staleness import bound as bound_lib

_BIG = 2**64 - 1


def _entry(key, version=0, created_at_s=0.0):
  return entries.Entry(key, version, created_at_s, permit_id=-key, length=key)


def _loose(*keys):
  return [(key, [_entry(key, version=key)]) for key in keys]


def test_the_first_of_each_key_counts():
  known = entry_set.EntrySet()
  known.add([(1, [_entry(1, version=5)])], now_s=10.0)
  known.add([(1, [_entry(1, version=6)]), *_loose(2, 2)], now_s=20.0)
  assert len(known) == 2
  assert known.entries(np.array([True, True])) == [
    _entry(1, version=5),
    _entry(2, version=2),
  ]
  np.testing.assert_array_equal(known.known_since_s, [10.0, 20.0])
  assert 1 in known and 3 not in known
  assert set(known.holders) == {1, 2}


def test_causes_are_those_of_the_bound():
  known = entry_set.EntrySet()
  entries_ = [
    _entry(1, version=1, created_at_s=100.0),
    _entry(2, version=2, created_at_s=100.0),
    _entry(3, version=3, created_at_s=89.0),
    _entry(4, version=1, created_at_s=80.0),
  ]
  known.add([(9, entries_)], now_s=0.0)
  bound = bound_lib.StalenessBound(max_policy_lag=1, max_age_s=10.0)
  causes = known.causes(bound, learner_version=3, now_s=100.0)
  assert [bound_lib.CAUSES.get(c, 'fresh') for c in causes.tolist()] == [
    'lag',
    'fresh',
    'age',
    'lag',
  ]


@pytest.mark.parametrize('key', [3, _BIG])
def test_removals_hold_what_the_learner_needs(key):
  known = entry_set.EntrySet()
  entry = entries.Entry(key, 1, 2.0, permit_id=-7, length=8)
  known.add([(key, [entry])], now_s=0.0)
  assert known.removals(np.array([True]), 2) == [entries.Removal(key, -7, 8, 2)]


def test_an_emptied_holder_is_told_once_and_kept_while_it_holds_any():
  known = entry_set.EntrySet()
  known.add([(_BIG, [_entry(1), _entry(2)]), *_loose(3)], now_s=0.0)
  np.testing.assert_array_equal(known.loose, [False, False, True])
  assert known.discard(np.array([True, False, True])) == [3]
  assert set(known.holders) == {_BIG} and len(known) == 1
  assert known.discard(np.array([True])) == [_BIG]
  assert not known.holders and not len(known)
  assert 2 not in known


def test_moved_entries_leave_their_old_holders():
  known = entry_set.EntrySet()
  known.add(_loose(1, 2, 3), now_s=0.0)
  known.move(np.array([True, True, False]), _BIG)
  assert set(known.holders) == {_BIG, 3}
  np.testing.assert_array_equal(known.loose, [False, False, True])
  assert known.discard(np.array([False, True, False])) == []
  assert known.discard(np.array([True, False])) == [_BIG]


def test_marks_stay_with_their_entries():
  known = entry_set.EntrySet()
  known.add(_loose(1, 2), now_s=0.0)
  known.add(_loose(3), now_s=0.0, doubtful=True)
  known.told[known.keys == 2] = True
  known.discard(known.keys == 1)
  np.testing.assert_array_equal(known.keys, np.array([2, 3], np.uint64))
  np.testing.assert_array_equal(known.told, [True, False])
  np.testing.assert_array_equal(known.doubtful, [False, True])
