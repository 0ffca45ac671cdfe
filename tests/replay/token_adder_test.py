"""What is stored of an episode of tokens, and what is refused."""

import dm_env
from dm_env import specs as dm_specs
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb.replay import test_utils
from tunix_reverb.replay import token_adder

_VOCABULARY = 1000
_SPEC = specs.EnvironmentSpec(
  observation=dm_specs.BoundedArray((), np.uint16, 0, _VOCABULARY - 1),
  action=dm_specs.DiscreteArray(_VOCABULARY),
  reward=dm_specs.Array((), np.float32),
  discount=dm_specs.BoundedArray((), np.float32, 0, 1),
)
_COLUMNS = specs.trajectories_spec(_SPEC, has_turns=True)
_FIRST, _MID, _LAST = (int(s) for s in dm_env.StepType)


def _adder(*, length, num=1, item_transitions=1):
  writer = test_utils.ListWriter()
  adder = token_adder.TokenAdder(
    columns=_COLUMNS,
    num_environments=num,
    trajectory_length=length,
    writer=writer,
    actor_id=0,
    item_transitions=item_transitions,
    item_age_s=1e9,
  )
  return adder, writer


def _add(adder, step_type, token, mask, turn, *, version=1, ids=(0,), **kwargs):
  """The policy always says 999 with log-probability -token."""
  ids = np.array(ids, np.int32)
  all_of = lambda value, dtype: np.full(ids.size, value, dtype)
  adder.add(
    ids,
    action=all_of(999, np.int32),
    behaviour_log_prob=all_of(-token, np.float32),
    policy_version=all_of(version, np.int32),
    timestep=dm_env.TimeStep(
      all_of(step_type, np.int32),
      all_of(kwargs.get('reward', 0.0), np.float32),
      all_of(0.0 if step_type == _LAST else 1.0, np.float32),
      {
        'token': all_of(token, np.uint16),
        'loss_mask': all_of(mask, np.bool_),
        'turn_id': all_of(turn, np.int32),
      },
    ),
  )


def test_prompt_turn_and_tool_output():
  adder, writer = _adder(length=6)
  _add(adder, _FIRST, 500, False, 0)
  _add(adder, _MID, 501, True, 1)  # The prompt's second token ends it.
  _add(adder, _MID, 7, True, 1)
  _add(adder, _MID, 8, False, 2, version=2)  # A tool was called.
  _add(adder, _MID, 600, True, 3, version=2)  # What it said.
  _add(adder, _LAST, 9, False, 0, version=3, reward=1.0)
  (item,) = writer.items
  assert item.lengths.tolist() == [5]
  assert item.observation.tolist() == [500, 501, 7, 8, 600, 9]
  assert item.observation.dtype == item.action.dtype == np.uint16
  assert item.action.tolist() == item.observation[1:].tolist()
  assert item.loss_mask.tolist() == [False, True, True, False, True]
  assert item.turn_id.tolist() == [0, 1, 1, 2, 3]
  assert item.behaviour_log_prob.tolist() == [0, -7, -8, 0, -9]
  assert item.policy_version.tolist() == [1, 1, 2, 2, 3]
  assert item.reward.tolist() == [0, 0, 0, 0, 1]
  assert all(
    spec.accepts(column)
    for spec, column in zip(
      specs.flatten_columns(_COLUMNS).values(),
      specs.flatten_columns(item).values(),
    )
  )


def test_environments_at_different_places_keep_their_own():
  adder, writer = _adder(length=3, num=2, item_transitions=100)
  _add(adder, _FIRST, 10, True, 4, ids=(0,))
  _add(adder, _FIRST, 20, False, 5, ids=(1,))
  _add(adder, _MID, 30, True, 6, ids=(0, 1))
  _add(adder, _LAST, 11, False, 0, ids=(0,))
  _add(adder, _LAST, 21, False, 0, ids=(1,))
  adder.flush()
  (item,) = writer.items
  assert item.lengths.tolist() == [2, 2]
  assert item.observation.tolist() == [10, 30, 11, 20, 30, 21]
  assert item.action.tolist() == [30, 11, 30, 21]
  assert item.loss_mask.tolist() == [True, True, False, True]
  assert item.turn_id.tolist() == [4, 6, 5, 6]


@pytest.mark.parametrize('num', [1, 2])
def test_an_episode_that_would_be_cut_is_refused(num):
  adder, writer = _adder(length=2, num=num)
  ids = range(num)
  _add(adder, _FIRST, 1, True, 0, ids=ids)
  _add(adder, _MID, 2, True, 0, ids=ids)
  if num == 2:  # One ends in time while the other goes on.
    _add(adder, _LAST, 3, True, 0, ids=(0,))
    assert len(writer.items) == 1
    ids = (1,)
  with pytest.raises(errors.UserError, match=r'trajectory_length \(2\)'):
    _add(adder, _MID, 3, True, 0, ids=ids)


def test_an_episode_that_just_fits_is_stored():
  adder, writer = _adder(length=2)
  for _ in range(2):
    _add(adder, _FIRST, 1, True, 0)
    _add(adder, _MID, 2, True, 0)
    _add(adder, _LAST, 3, False, 0)
  assert [item.lengths.tolist() for item in writer.items] == [[2], [2]]
