"""Drops by cause and by length decile."""

import numpy as np

from tunix_reverb.telemetry import drops as drops_lib


def test_by_cause_and_decile():
  drops = drops_lib.DropCounter(('lag', 'age'))
  drops.see(np.arange(1, 101, dtype=np.int32))
  drops.drop('age', np.array([95, 96, 97], np.int32))
  drops.drop('lag', np.array([1], np.int32))
  assert drops.by_cause() == {'lag': 1, 'age': 3}
  assert drops.by_decile().tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 3]
  assert drops.seen_total == 100


def test_equal_lengths_share_the_middle_decile():
  drops = drops_lib.DropCounter(('age',))
  drops.see(np.full(50, 9, np.int32))
  drops.drop('age', np.full(5, 9, np.int32))
  assert drops.by_decile()[5] == 5


def test_nothing_seen_yet():
  drops = drops_lib.DropCounter(('age',))
  assert drops.by_cause() == {'age': 0}
  assert drops.by_decile().tolist() == [0] * 10


def test_what_could_not_be_read_counts_in_no_decile():
  drops = drops_lib.DropCounter(('age', 'poison'))
  drops.see(np.arange(1, 11, dtype=np.int32))
  drops.set_unread('poison', 2)
  drops.set_unread('poison', 3)
  drops.drop('age', np.array([4], np.int32))
  assert drops.by_cause() == {'age': 1, 'poison': 3}
  assert drops.by_decile().sum() == 1
