"""Golden timelines: which transitions are stored, and as what, at episode ends.

Observations are the global timestep number, so that a column says where it
came from.
"""

import dm_env
from dm_env import specs as dm_specs
import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb.replay import adder as adder_lib
from tunix_reverb.replay import test_utils

_SPEC = specs.EnvironmentSpec(
  observation=dm_specs.Array((), np.float32),
  action=dm_specs.DiscreteArray(300),
  reward=dm_specs.Array((), np.float32),
  discount=dm_specs.BoundedArray((), np.float32, 0, 1),
)
_CORE = dm_specs.Array((2,), np.float32)


class _Clock:
  def __init__(self):
    self.now_s = 100.0

  def __call__(self):
    return self.now_s


def _adder(
  *, length=3, num=1, item_transitions=1, core_state=(), writer=None, **kwargs
):
  writer = writer or test_utils.ListWriter()
  adder = adder_lib.TrajectoryAdder(
    columns=specs.trajectories_spec(_SPEC, core_state),
    num_environments=num,
    trajectory_length=length,
    writer=writer,
    actor_id=7,
    item_transitions=item_transitions,
    item_age_s=kwargs.pop('item_age_s', 1e9),
    **kwargs,
  )
  return adder, writer


def _first(adder, ids, observation, core_state=()):
  """Starts episodes of `ids`; action and log-probability are rubbish."""
  rubbish = np.full(ids.size, 99)
  adder.add(
    ids,
    action=rubbish,
    behaviour_log_prob=rubbish,
    policy_version=rubbish,
    timestep=dm_env.TimeStep(
      np.zeros(ids.size, np.int32),
      np.zeros(ids.size, np.float32),
      np.ones(ids.size, np.float32),
      observation,
    ),
    core_state=core_state,
  )


def _play(adder, steps, *, environment=0, first=0):
  """Plays one episode: `steps` of (reward, discount), the last one is LAST."""
  ids = np.array([environment], np.int32)
  _first(adder, ids, np.array([first], np.float32))
  for i, (reward, discount) in enumerate(steps):
    last = i == len(steps) - 1
    adder.add(
      ids,
      action=np.array([first + i]),
      behaviour_log_prob=np.array([-0.5 * i], np.float32),
      policy_version=np.array([10 + i], np.int32),
      timestep=dm_env.TimeStep(
        step_type=np.array([2 if last else 1], np.int32),
        reward=np.array([reward], np.float32),
        discount=np.array([discount], np.float32),
        observation=np.array([first + i + 1], np.float32),
      ),
    )


def _timeline(item):
  """(observations, actions, rewards, discounts, truncated) per trajectory."""
  result = []
  at = 0
  for n, length in enumerate(item.lengths.tolist()):
    steps = slice(at, at + length)
    timesteps = slice(at + n, at + n + length + 1)
    result.append(
      (
        item.observation[timesteps].tolist(),
        item.action[steps].tolist(),
        item.reward[steps].tolist(),
        item.discount[steps].tolist(),
        bool(item.truncated[n]),
      )
    )
    at += length
  return result


def test_termination_keeps_discount_0_and_the_last_observation():
  adder, writer = _adder()
  _play(adder, [(0.0, 1.0), (5.0, 0.0)])
  assert [_timeline(i) for i in writer.items] == [
    [([0, 1, 2], [0, 1], [0, 5], [1, 0], False)]
  ]


def test_truncation_keeps_its_discount_so_that_it_bootstraps():
  adder, writer = _adder()
  _play(adder, [(1.0, 1.0), (1.0, 1.0)])
  assert [_timeline(i) for i in writer.items] == [
    [([0, 1, 2], [0, 1], [1, 1], [1, 1], True)]
  ]


def test_a_long_episode_is_cut_into_unrolls_that_overlap_by_one_timestep():
  adder, writer = _adder(length=3)
  _play(adder, [(0, 1), (0, 1), (0, 1), (0, 1), (9, 0)])
  assert [_timeline(i) for i in writer.items] == [
    [([0, 1, 2, 3], [0, 1, 2], [0, 0, 0], [1, 1, 1], False)],
    [([3, 4, 5], [3, 4], [0, 9], [1, 0], False)],
  ]
  assert [i.episode_id.tolist() for i in writer.items] == [[0], [0]]


def test_an_episode_of_exactly_the_trajectory_length_leaves_nothing_open():
  adder, writer = _adder(length=3)
  _play(adder, [(0, 1), (0, 1), (9, 0)])
  _play(adder, [(4, 0)], first=50)
  assert [_timeline(i) for i in writer.items] == [
    [([0, 1, 2, 3], [0, 1, 2], [0, 0, 9], [1, 1, 0], False)],
    [([50, 51], [50], [4], [0], False)],
  ]
  assert [i.episode_id.tolist() for i in writer.items] == [[0], [1]]


def test_columns_of_one_transition():
  clock = _Clock()
  adder, writer = _adder(clock=clock)
  _play(adder, [(0, 1), (2, 0)])
  item = writer.items[0]
  assert item.behaviour_log_prob.tolist() == [0.0, -0.5]
  assert item.policy_version.tolist() == [10, 11]
  assert item.loss_mask.all()
  assert item.created_at_s.tolist() == [100.0]
  assert item.actor_id.tolist() == [7]
  assert item.action.dtype == np.uint16  # The smallest that holds 0..299.
  spec = specs.flatten_columns(specs.trajectories_spec(_SPEC))
  for name, column in specs.flatten_columns(item).items():
    assert spec[name].accepts(column), name


def test_environments_do_not_mix():
  adder, writer = _adder(num=3)
  _play(adder, [(0, 1)] * 2 + [(1, 0)], environment=2, first=200)
  _play(adder, [(0, 1), (1, 0)], environment=0, first=0)
  assert [_timeline(i)[0][0] for i in writer.items] == [
    [200, 201, 202, 203],
    [0, 1, 2],
  ]


def test_environments_that_end_together_share_items_up_to_their_size():
  writer = test_utils.ListWriter()
  adder, _ = _adder(num=4, length=8, item_transitions=6, writer=writer)
  ids = np.arange(4, dtype=np.int32)
  _first(adder, ids, np.zeros(4, np.float32))
  for step in range(2):
    adder.add(
      ids,
      action=np.zeros(4, np.int64),
      behaviour_log_prob=np.zeros(4, np.float32),
      policy_version=np.zeros(4, np.int32),
      timestep=dm_env.TimeStep(
        np.full(4, 1 + step, np.int32),
        np.zeros(4, np.float32),
        np.full(4, 1.0 - step, np.float32),
        ids + 10.0 * step,
      ),
    )
  adder.flush()
  # Three trajectories of 2 transitions fit into 6.
  assert [i.lengths.tolist() for i in writer.items] == [[2, 2, 2], [2]]
  assert writer.items[1].observation.tolist() == [0, 3, 13]


def test_a_group_is_sent_at_its_age():
  clock = _Clock()
  adder, writer = _adder(item_transitions=10**4, item_age_s=0.5, clock=clock)
  _play(adder, [(1, 0)])
  assert not writer.items
  clock.now_s += 0.6
  _first(adder, np.zeros(1, np.int32), np.zeros(1, np.float32))
  adder.add(
    np.zeros(1, np.int32),
    action=np.zeros(1, np.int64),
    behaviour_log_prob=np.zeros(1, np.float32),
    policy_version=np.zeros(1, np.int32),
    timestep=dm_env.TimeStep(
      np.ones(1, np.int32),
      np.zeros(1, np.float32),
      np.ones(1, np.float32),
      np.zeros(1, np.float32),
    ),
  )
  assert [i.lengths.tolist() for i in writer.items] == [[1]]
  adder.flush()
  assert len(writer.items) == 1, 'an unfinished trajectory stays open'


def test_a_new_first_drops_the_unfinished_episode():
  adder, writer = _adder(length=9)
  ids = np.zeros(1, np.int32)
  _first(adder, ids, np.zeros(1, np.float32))
  _play(adder, [(1, 0)], first=5)
  assert [_timeline(i)[0][0] for i in writer.items] == [[5, 6]]


def test_a_start_without_first_is_refused():
  adder, _ = _adder()
  with pytest.raises(ValueError, match=r'environment_ids \(\[0\]\).*FIRST'):
    adder.add(
      np.zeros(1, np.int32),
      action=np.zeros(1, np.int64),
      behaviour_log_prob=np.zeros(1, np.float32),
      policy_version=np.zeros(1, np.int32),
      timestep=dm_env.TimeStep(
        np.ones(1, np.int32),
        np.zeros(1, np.float32),
        np.ones(1, np.float32),
        np.zeros(1, np.float32),
      ),
    )


def test_core_state_is_the_one_before_the_first_action_of_each_trajectory():
  adder, writer = _adder(length=2, core_state=_CORE)
  ids = np.zeros(1, np.int32)
  state = lambda value: np.full((1, 2), value, np.float32)
  _first(adder, ids, np.zeros(1, np.float32), state(0))
  for i in range(3):
    adder.add(
      ids,
      action=np.zeros(1, np.int64),
      behaviour_log_prob=np.zeros(1, np.float32),
      policy_version=np.zeros(1, np.int32),
      timestep=dm_env.TimeStep(
        np.array([2 if i == 2 else 1], np.int32),
        np.zeros(1, np.float32),
        np.ones(1, np.float32),
        np.zeros(1, np.float32),
      ),
      core_state=state(i + 1),
    )
  assert [i.core_state.tolist() for i in writer.items] == [
    [[0.0, 0.0]],
    [[2.0, 2.0]],
  ]


def test_a_full_table_is_waited_for_and_given_up_only_when_told():
  writer = test_utils.ListWriter()
  writer.full = True
  asked = []

  def keep_waiting():
    asked.append(1)
    return len(asked) < 3

  adder, _ = _adder(writer=writer, keep_waiting=keep_waiting)
  _play(adder, [(1, 0)])
  assert len(asked) == 3
  assert adder.given_up_total == 1 and adder.items_total == 0
  writer.full = False
  _play(adder, [(1, 0)], first=5)
  assert adder.items_total == 1 and len(writer.items) == 1


def test_environment_adder_writes_the_same_timeline():
  adder, writer = _adder(length=3)
  single = adder_lib.EnvironmentAdder(adder)
  single.add_first(dm_env.restart(np.float32(0)))
  extras = {'log_prob': np.float32(-1), 'policy_version': np.int32(3)}
  single.add(4, dm_env.transition(1.0, np.float32(1)), extras)
  single.add(5, dm_env.truncation(2.0, np.float32(2)), extras)
  assert [_timeline(i) for i in writer.items] == [
    [([0, 1, 2], [4, 5], [1, 2], [1, 1], True)]
  ]
  single.add_first(dm_env.restart(np.float32(7)))
  single.add(1, dm_env.transition(1.0, np.float32(8)), extras)
  single.reset()
  single.add_first(dm_env.restart(np.float32(9)))
  single.add(1, dm_env.termination(1.0, np.float32(10)), extras)
  assert _timeline(writer.items[1])[0][0] == [9, 10]


def test_environment_adder_explains_misuse():
  single = adder_lib.EnvironmentAdder(_adder()[0])
  with pytest.raises(ValueError, match='must be FIRST'):
    single.add_first(dm_env.termination(0.0, np.float32(0)))
  single.add_first(dm_env.restart(np.float32(0)))
  with pytest.raises(ValueError, match='missing: log_prob, policy_version'):
    single.add(0, dm_env.termination(0.0, np.float32(0)), {})


def _move(adder, environment, observation, step_type=1):
  """One more timestep of one environment."""
  zero = np.zeros(1, np.float32)
  adder.add(
    np.array([environment], np.int32),
    action=np.zeros(1, np.uint8),
    behaviour_log_prob=zero,
    policy_version=np.ones(1, np.int32),
    timestep=dm_env.TimeStep(
      np.array([step_type], np.int32),
      zero,
      zero,
      np.array([observation], np.float32),
    ),
  )


def _lacks(adder, *ids):
  return adder.lacks_permit(np.array(ids, np.int32)).tolist()


def test_each_trajectory_takes_its_own_permit_along():
  clock = _Clock()
  adder, writer = _adder(length=2, num=2, clock=clock)
  ids = np.arange(2, dtype=np.int32)
  assert _lacks(adder, 0, 1) == [False, False], 'nothing has started'
  _first(adder, ids, np.zeros(2, np.float32))
  assert _lacks(adder, 0, 1) == [True, True]
  clock.now_s = 170.0
  adder.admit(ids[:1], np.array([2**40 + 5]))
  assert _lacks(adder, 0, 1) == [False, True]
  _move(adder, 0, 1.0)
  _move(adder, 0, 2.0)
  # A cut: the next unroll of the episode needs a permit of its own.
  assert _lacks(adder, 0) == [True]
  adder.admit(ids[:1], np.array([6]))
  _move(adder, 0, 3.0, step_type=2)
  assert _lacks(adder, 0) == [False], 'a reset needs none'
  assert [item.permit_id.tolist() for item in writer.items] == [
    [2**40 + 5],
    [6],
  ]
  assert all(item.permit_id.dtype == np.int64 for item in writer.items)
  # Age counts from the first action, not from the wait for it.
  assert writer.items[0].created_at_s.tolist() == [170.0]


def test_a_lost_trajectory_leaves_its_permit_to_the_next():
  adder, writer = _adder(length=9, num=1)
  ids = np.zeros(1, np.int32)
  _first(adder, ids, np.zeros(1, np.float32))
  adder.admit(ids, np.array([5]))
  _move(adder, 0, 1.0)
  adder.drop(ids)
  _first(adder, ids, np.zeros(1, np.float32))
  assert _lacks(adder, 0) == [False]
  _move(adder, 0, 1.0)
  _first(adder, ids, np.zeros(1, np.float32))  # An environment that failed.
  _move(adder, 0, 1.0, step_type=2)
  assert [item.permit_id.tolist() for item in writer.items] == [[5]]
  _first(adder, ids, np.zeros(1, np.float32))
  assert _lacks(adder, 0) == [True]
