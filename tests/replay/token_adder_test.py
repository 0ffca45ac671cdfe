"""Which trajectories of tokens become one item, and when."""

import numpy as np
import pytest

from tunix_reverb import types
from tunix_reverb.replay import test_utils
from tunix_reverb.replay import token_adder


def _trajectories(*lengths, permit_id=0):
  """Trajectories laid end to end, each of tokens that say which it is."""
  lengths = np.array(lengths, np.int32)
  size = int(lengths.sum())
  of_each = lambda values, dtype: np.array(values, dtype)
  zeros = lambda dtype: np.zeros(size, dtype)
  return types.Trajectories(
    observation=np.repeat(lengths, lengths + 1).astype(np.uint8),
    action=np.repeat(lengths, lengths).astype(np.uint8),
    reward=zeros(np.float32),
    discount=zeros(np.float32),
    behaviour_log_prob=zeros(np.float32),
    policy_version=zeros(np.int32),
    loss_mask=zeros(np.bool_),
    core_state=(),
    lengths=lengths,
    created_at_s=of_each([0.0] * lengths.size, np.float64),
    actor_id=of_each([0] * lengths.size, np.int32),
    episode_id=of_each([0] * lengths.size, np.int64),
    truncated=of_each([False] * lengths.size, np.bool_),
    permit_id=of_each([permit_id] * lengths.size, np.int64),
    turn_id=zeros(np.int32),
  )


class _Rig:
  def __init__(self, item_transitions, writer=None, **kwargs):
    self.now_s = 0.0
    self.writer = writer or test_utils.ListWriter()
    self.adder = token_adder.TokenAdder(
      writer=self.writer,
      item_transitions=item_transitions,
      item_age_s=0.5,
      clock=lambda: self.now_s,
      **kwargs,
    )

  @property
  def lengths(self):
    return [item.lengths.tolist() for item in self.writer.items]


def test_one_at_a_time_is_sent_at_once():
  rig = _Rig(1)
  for length in (3, 2):
    rig.adder.add(_trajectories(length))
  assert rig.lengths == [[3], [2]]
  assert rig.adder.items_total == 2


def test_small_ones_are_gathered_up_to_the_size():
  rig = _Rig(6)
  for length in (2, 3, 2, 6, 1):
    rig.adder.add(_trajectories(length))
  # 2 + 3 + 2 would be too large, as would any with the one of 6.
  assert rig.lengths == [[2, 3], [2], [6]]
  item = rig.writer.items[0]
  assert item.observation.tolist() == [2] * 3 + [3] * 4
  assert item.action.tolist() == [2] * 2 + [3] * 3
  assert item.core_state == () and item.advantage == ()
  rig.adder.flush()
  assert rig.lengths[-1] == [1]
  rig.adder.flush()
  assert len(rig.lengths) == 4


def test_what_was_added_together_stays_together():
  rig = _Rig(6)
  rig.adder.add(_trajectories(1))
  rig.adder.add(_trajectories(4, 3, 2))
  rig.adder.add(_trajectories(1, 1))
  rig.adder.flush()
  assert rig.lengths == [[1], [4, 3, 2], [1, 1]]


def test_they_are_sent_at_an_age():
  rig = _Rig(100)
  rig.adder.send_due()
  rig.adder.add(_trajectories(1))
  rig.now_s = 0.3
  rig.adder.add(_trajectories(2))
  rig.now_s = 0.5
  rig.adder.send_due()
  assert rig.lengths == []
  rig.now_s = 0.51
  rig.adder.send_due()
  assert rig.lengths == [[1, 2]]


@pytest.mark.parametrize('patience', [0, 3])
def test_without_room_it_waits_as_long_as_it_is_told(patience):
  class Full(test_utils.ListWriter):
    tries = 0

    def write(self, trajectories, timeout_s=None):
      self.tries += 1
      return self.tries > 2 and super().write(trajectories, timeout_s)

  asked = iter([True] * patience + [False])
  rig = _Rig(1, Full(), keep_waiting=lambda: next(asked))
  rig.adder.add(_trajectories(2, 3))
  assert rig.lengths == ([[2, 3]] if patience else [])
  assert rig.adder.given_up_total == (0 if patience else 2)
  assert rig.adder.items_total == (1 if patience else 0)
