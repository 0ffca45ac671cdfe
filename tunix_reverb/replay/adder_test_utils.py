"""The contracts of `core.Adder` and `core.VectorAdder`, as tests to inherit.

Inherit a mixin, implement its hooks, and pytest runs the contract. Not imported
by the library.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import dm_env
import numpy as np

from tunix_reverb import core
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.replay import test_utils


def timesteps(
  start: float, length: int, last_discount: float = 0.0
) -> list[dm_env.TimeStep]:
  """An episode that fits `test_utils.columns`: FIRST and `length` transitions.

  Timestep t observes position `start` + t, and its reward is the same number;
  `start` tells episodes apart.
  """
  result = []
  for t in range(length + 1):
    observation = {
      'position': np.full(3, start + t, np.float32),
      'a/flag': np.uint8(t),
    }
    if t == 0:
      result.append(dm_env.restart(observation))
    elif t < length:
      result.append(dm_env.transition(start + t, observation, 0.5))
    else:
      result.append(
        dm_env.TimeStep(
          dm_env.StepType.LAST, start + t, last_discount, observation
        )
      )
  return result


class AdderContract(abc.ABC):
  """What every `core.Adder` writes, with `test_utils.columns`."""

  @abc.abstractmethod
  def make_adder(self, trajectory_length: int) -> core.Adder:
    """An adder of trajectories of up to that many transitions."""

  @abc.abstractmethod
  def written(self, adder: core.Adder) -> list[types.Trajectories]:
    """All items that `adder` has written of the trajectories that ended."""

  def add_episode(
    self, adder: core.Adder, episode: list[dm_env.TimeStep]
  ) -> None:
    """Adds an episode, or the beginning of one, and reuses its arrays.

    The action that led to timestep t is t, its log-probability -t, its
    version 10 + t, and the state after it (t, t).
    """
    adder.add_first(episode[0])
    for t, timestep in enumerate(episode[1:], start=1):
      action = np.array(t, np.uint8)
      adder.add(
        action,
        timestep,
        extras={
          'log_prob': np.float32(-t),
          'policy_version': np.int32(10 + t),
          'core_state': (np.full(2, t, np.float32),),
        },
      )
      action[...] = 99
      timestep.observation['position'][:] = np.nan

  def test_an_episode_is_stored_as_it_was(self):
    adder = self.make_adder(trajectory_length=5)
    self.add_episode(adder, timesteps(100.0, 3))
    (item,) = self.written(adder)
    assert item.lengths.tolist() == [3]
    positions = item.observation['position']
    # The adder was given the first one, and keeps it, by value.
    assert positions[:, 0].tolist() == [100, 101, 102, 103]
    assert item.observation['a/flag'].tolist() == [0, 1, 2, 3]
    assert item.action.tolist() == [1, 2, 3]
    assert item.reward.tolist() == [101, 102, 103]
    assert item.discount.tolist() == [0.5, 0.5, 0.0]
    assert item.behaviour_log_prob.tolist() == [-1, -2, -3]
    assert item.policy_version.tolist() == [11, 12, 13]
    assert item.loss_mask.all()
    assert item.core_state[0].tolist() == [[0, 0]]
    for ours, spec in zip(
      specs.flatten_columns(item).values(),
      specs.flatten_columns(test_utils.columns()).values(),
    ):
      assert spec.accepts(ours)

  def test_a_long_episode_is_cut_with_one_timestep_of_overlap(self):
    adder = self.make_adder(trajectory_length=2)
    self.add_episode(adder, timesteps(100.0, 5))
    parts = list(_split(self.written(adder)))
    assert [p['position'].tolist() for p in parts] == [
      [100, 101, 102],
      [102, 103, 104],
      [104, 105],
    ]
    assert [p['action'].tolist() for p in parts] == [[1, 2], [3, 4], [5]]
    assert [p['core_state'].tolist() for p in parts] == [
      [0, 0],
      [2, 2],
      [4, 4],
    ]
    assert len({p['episode_id'] for p in parts}) == 1

  def test_truncation_is_told_from_termination(self):
    adder = self.make_adder(trajectory_length=2)
    self.add_episode(adder, timesteps(100.0, 3, last_discount=0.0))
    self.add_episode(adder, timesteps(200.0, 3, last_discount=0.75))
    parts = list(_split(self.written(adder)))
    assert [p['truncated'] for p in parts] == [False, False, False, True]
    assert [p['discount'][-1] for p in parts] == [0.5, 0.0, 0.5, 0.75]
    ids = [p['episode_id'] for p in parts]
    assert ids[0] == ids[1] != ids[2] == ids[3]

  def test_an_unfinished_episode_is_dropped_by_reset_and_by_the_next(self):
    adder = self.make_adder(trajectory_length=9)
    self.add_episode(adder, timesteps(100.0, 5)[:3])
    adder.reset()
    self.add_episode(adder, timesteps(200.0, 2))
    self.add_episode(adder, timesteps(300.0, 5)[:4])
    self.add_episode(adder, timesteps(400.0, 1))
    parts = list(_split(self.written(adder)))
    assert [p['position'].tolist() for p in parts] == [
      [200, 201, 202],
      [400, 401],
    ]

  def test_misuse_is_refused(self):
    adder = self.make_adder(trajectory_length=5)
    first, middle, _ = timesteps(0.0, 2)
    extras = {
      'log_prob': np.float32(0),
      'policy_version': np.int32(1),
      'core_state': (np.zeros(2, np.float32),),
    }
    for misuse, word in (
      (lambda: adder.add_first(middle), 'FIRST'),
      (lambda: adder.add(np.uint8(0), middle, extras), 'FIRST'),
    ):
      _assert_refused(misuse, word)
    adder.add_first(first)
    del extras['log_prob']
    _assert_refused(lambda: adder.add(np.uint8(0), middle, extras), 'log_prob')


class VectorAdderContract(abc.ABC):
  """What every `core.VectorAdder` writes, with `test_utils.columns`."""

  @abc.abstractmethod
  def make_adder(
    self, trajectory_length: int, num_environments: int
  ) -> core.VectorAdder:
    """An adder of trajectories of up to that many transitions."""

  @abc.abstractmethod
  def written(self) -> list[types.Trajectories]:
    """All items that the adder has written so far."""

  def add(
    self, adder: core.VectorAdder, steps: dict[int, dm_env.TimeStep]
  ) -> None:
    """Adds what the environments `steps` answered, and reuses the arrays.

    The action that led to a timestep, its version and what follows from them
    is the `a/flag` that the timestep observes.
    """
    ids = np.array(sorted(steps), np.int32)
    stack = lambda get: np.stack([get(steps[i]) for i in sorted(steps)])
    flag = stack(lambda s: s.observation['a/flag'])
    batch = dm_env.TimeStep(
      step_type=stack(lambda s: np.int32(s.step_type)),
      reward=stack(lambda s: np.float32(s.reward or 0.0)),
      discount=stack(
        lambda s: np.float32(1.0 if s.discount is None else s.discount)
      ),
      observation={
        'position': stack(lambda s: s.observation['position']),
        'a/flag': flag,
      },
    )
    adder.add(
      ids,
      action=flag,
      behaviour_log_prob=-flag.astype(np.float32),
      policy_version=10 + flag.astype(np.int32),
      timestep=batch,
      core_state=(np.tile(flag[:, None].astype(np.float32), 2),),
    )
    batch.observation['position'][:] = np.nan  # The caller may reuse it.
    batch.reward[:] = np.nan

  def test_environments_end_at_different_times_and_do_not_mix(self):
    adder = self.make_adder(trajectory_length=3, num_environments=3)
    episodes = [timesteps(100.0 * (i + 1), 2 + 2 * i) for i in range(3)]
    for t in range(7):
      steps = {i: e[t] for i, e in enumerate(episodes) if t < len(e)}
      self.add(adder, steps)
    adder.flush()
    parts = list(_split(self.written()))
    assert sorted(p['position'].tolist() for p in parts) == [
      [100, 101, 102],
      [200, 201, 202, 203],
      [203, 204],
      [300, 301, 302, 303],
      [303, 304, 305, 306],
    ]
    assert len({p['episode_id'] for p in parts}) == 3
    for part in parts:
      start = part['position'][0] % 100
      steps = (start + 1 + np.arange(part['action'].size)).tolist()
      assert part['action'].tolist() == steps
      assert part['core_state'].tolist() == [start, start]
      assert part['reward'].tolist() == part['position'][1:].tolist()
      assert part['policy_version'].tolist() == [10 + s for s in steps]

  def test_flush_leaves_unfinished_trajectories_open(self):
    adder = self.make_adder(trajectory_length=9, num_environments=2)
    episode = timesteps(100.0, 3)
    self.add(adder, {1: episode[0]})
    self.add(adder, {1: episode[1]})
    adder.flush()
    assert self.written() == []
    self.add(adder, {1: episode[2]})
    self.add(adder, {1: episode[3]})
    adder.flush()
    (part,) = _split(self.written())
    assert part['position'].tolist() == [100, 101, 102, 103]

  def test_first_drops_the_unfinished_episode_of_its_environment_alone(self):
    adder = self.make_adder(trajectory_length=9, num_environments=2)
    lost, kept, new = (timesteps(100.0 * n, 2) for n in (1, 2, 3))
    self.add(adder, {0: lost[0], 1: kept[0]})
    self.add(adder, {0: lost[1], 1: kept[1]})
    self.add(adder, {0: new[0], 1: kept[2]})
    self.add(adder, {0: new[1]})
    self.add(adder, {0: new[2]})
    adder.flush()
    parts = list(_split(self.written()))
    assert sorted(p['position'].tolist() for p in parts) == [
      [200, 201, 202],
      [300, 301, 302],
    ]

  def test_an_environment_must_begin_with_first(self):
    adder = self.make_adder(trajectory_length=9, num_environments=2)
    first, middle, _ = timesteps(0.0, 2)
    _assert_refused(lambda: self.add(adder, {0: first, 1: middle}), '1')


def _split(items: list[types.Trajectories]) -> Iterator[dict[str, Any]]:
  """Each trajectory's own columns; of the observation its position."""
  for item in items:
    end = 0
    for n, length in enumerate(item.lengths):
      start, end = end, end + int(length)
      yield {
        'position': item.observation['position'][start + n : end + n + 1, 0],
        'core_state': item.core_state[0][n],
        'truncated': bool(item.truncated[n]),
        'permit_id': int(item.permit_id[n]),
        'episode_id': int(item.episode_id[n]),
        **{
          name: getattr(item, name)[start:end]
          for name in ('action', 'reward', 'discount', 'policy_version')
        },
      }


def _assert_refused(misuse: Callable[[], None], word: str) -> None:
  try:
    misuse()
  except ValueError as e:
    assert word in str(e), e
  else:
    raise AssertionError(f'accepted, though {word} is wrong')
