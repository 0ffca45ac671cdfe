"""Contract tests of the replay interfaces, for every implementation.

Inherit a mixin, implement its hooks, and pytest runs the contract. Also holds
small items for tests. Not imported by the library.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from collections.abc import Iterator
import time
from typing import Any

import dm_env
import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types

# Wall-clock slack of a deadline on a busy machine, seconds.
_SLACK_S = 2.0


def columns(observation_size: int = 3) -> types.Trajectories:
  """`ColumnSpec`s of a small agent with a nested observation."""

  def column(dtype: str, *shape: int) -> specs.ColumnSpec:
    return specs.ColumnSpec((None, *shape), np.dtype(dtype))

  return types.Trajectories(
    observation={
      'position': column('float32', observation_size),
      'a/flag': column('uint8'),
    },
    action=column('uint8'),
    reward=column('float32'),
    discount=column('float32'),
    behaviour_log_prob=column('float32'),
    policy_version=column('int32'),
    loss_mask=column('bool'),
    core_state=(column('float32', 2),),
    lengths=column('int32'),
    created_at_s=column('float64'),
    actor_id=column('int32'),
    episode_id=column('int64'),
    truncated=column('bool'),
  )


def item(
  episode_id: int = 0,
  *,
  lengths: tuple[int, ...] = (3,),
  policy_version: int = 1,
  observation_size: int = 3,
) -> types.Trajectories:
  """An item that fits `columns`, told apart by its `episode_id`."""
  n, s = len(lengths), sum(lengths)
  position = np.arange((s + n) * observation_size, dtype=np.float32)
  return types.Trajectories(
    observation={
      'position': position.reshape(s + n, observation_size) + episode_id,
      'a/flag': np.arange(s + n, dtype=np.uint8),
    },
    action=np.arange(s, dtype=np.uint8),
    reward=np.arange(s, dtype=np.float32),
    discount=np.ones(s, np.float32),
    behaviour_log_prob=np.full(s, -1.5, np.float32),
    policy_version=np.full(s, policy_version, np.int32),
    loss_mask=np.ones(s, bool),
    core_state=(np.full((n, 2), episode_id, np.float32),),
    lengths=np.array(lengths, np.int32),
    created_at_s=np.full(n, 1.25e9 + 0.5),
    actor_id=np.zeros(n, np.int32),
    episode_id=np.full(n, episode_id, np.int64),
    truncated=np.zeros(n, bool),
  )


def timesteps(
  start: float, length: int, last_discount: float = 0.0
) -> list[dm_env.TimeStep]:
  """An episode that fits `columns`: FIRST and `length` transitions.

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
  """What every `core.Adder` writes, of an agent with `columns`."""

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
      specs.flatten_columns(columns()).values(),
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
  """What every `core.VectorAdder` writes, of an agent with `columns`."""

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


class ItemWriterContract(abc.ABC):
  """What every `core.ItemWriter` does, on a table that holds few items."""

  @abc.abstractmethod
  def make_writer(self) -> core.ItemWriter:
    """A writer of items like `item()` into a new, empty queue table."""

  @abc.abstractmethod
  def drain(self, num_items: int) -> list[int]:
    """Takes `num_items` items out of the table: their episode ids."""

  def test_written_items_arrive_in_order(self):
    writer = self.make_writer()
    assert all(writer.write(item(i), 10.0) for i in range(2))
    assert self.drain(2) == [0, 1]
    assert writer.close(10.0)

  def test_a_full_table_makes_write_return_false_by_its_deadline(self):
    writer = self.make_writer()
    written = 0
    start_s = time.monotonic()
    while writer.write(item(written), 0.3):
      written += 1
      assert written < 100, 'the table never fills'
      start_s = time.monotonic()
    assert time.monotonic() - start_s < 0.3 + _SLACK_S
    assert writer.blocked_s() >= 0.3
    # Nothing of the refused item was written: the next in order is the same.
    ids = self.drain(written)
    assert writer.write(item(written), 10.0)
    assert ids + self.drain(1) == list(range(written + 1))
    assert writer.close(10.0)

  def test_close_of_a_blocked_writer_keeps_its_deadline(self):
    writer = self.make_writer()
    while writer.write(item(), 0.3):
      pass
    start_s = time.monotonic()
    assert not writer.close(0.5)
    assert time.monotonic() - start_s < 0.5 + _SLACK_S

  def test_a_wrong_column_is_refused_by_name_and_nothing_is_lost(self):
    writer = self.make_writer()
    bad = item(7)._replace(reward=np.zeros(3, np.float64))
    try:
      writer.write(bad, 1.0)
    except errors.SpecMismatchError as e:
      assert 'reward' in str(e)
      assert 'float64' in str(e) and 'float32' in str(e)
    else:
      raise AssertionError('the wrong dtype was accepted')
    assert writer.write(item(8), 10.0)
    assert self.drain(1) == [8]
    assert writer.close(10.0)


class ItemSamplerContract(abc.ABC):
  """What every `core.ItemSampler` does, on a table that was filled before."""

  @abc.abstractmethod
  def make_sampler(self) -> core.ItemSampler:
    """A sampler of a new, empty queue table."""

  @abc.abstractmethod
  def fill(self, items: list[types.Trajectories]) -> None:
    """Inserts `items` into that table and waits until they are there."""

  def test_an_item_comes_out_as_it_went_in(self):
    sampler = self.make_sampler()
    sent = item(5, lengths=(2, 4), policy_version=9)
    self.fill([sent])
    sampled = sampler.sample(20.0)
    assert sampled is not None
    assert sampled.priority == 9.0
    assert sampled.times_sampled == 1
    received = sampled.trajectories
    ours, theirs = specs.flatten_columns(sent), specs.flatten_columns(received)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
      np.testing.assert_array_equal(theirs[name], array, strict=True)
    sampler.close()

  def test_each_item_comes_once_and_in_order(self):
    sampler = self.make_sampler()
    self.fill([item(i) for i in range(4)])
    ids = [
      int(sampler.sample(20.0).trajectories.episode_id[0]) for _ in range(4)
    ]  # pyformat: skip
    assert ids == [0, 1, 2, 3]
    assert sampler.sample(0.2) is None
    sampler.close()

  def test_an_empty_table_gives_none_by_the_deadline(self):
    sampler = self.make_sampler()
    start_s = time.monotonic()
    assert sampler.sample(0.3) is None
    assert 0.3 <= time.monotonic() - start_s < 0.3 + _SLACK_S
    sampler.close()

  def test_close_is_prompt_and_final(self):
    sampler = self.make_sampler()
    start_s = time.monotonic()
    sampler.close()
    sampler.close()
    assert sampler.sample(0.1) is None
    assert time.monotonic() - start_s < _SLACK_S


class VariablesContract(abc.ABC):
  """What every pair of `core.VariableSink` and `core.VariableSource` does."""

  @abc.abstractmethod
  def make_sink(self) -> core.VariableSink:
    """A sink to a server without variables."""

  @abc.abstractmethod
  def make_source(self) -> core.VariableSource:
    """A source of the same server."""

  def test_nothing_published_gives_none_by_the_deadline(self):
    source = self.make_source()
    assert source.get_variables() is None
    start_s = time.monotonic()
    assert source.get_variables(1, 0.3) is None
    assert 0.3 <= time.monotonic() - start_s < 0.3 + _SLACK_S

  def test_published_variables_arrive_exactly(self):
    import ml_dtypes

    params = {
      'torso': [
        {'w': np.arange(6, dtype=np.float32).reshape(2, 3)},
        {'w': np.array([1.5, -0.25], ml_dtypes.bfloat16)},
      ],
      'empty': {},
      'count': np.array(3, np.int64),
      'pair': (np.zeros((0, 4), np.float16), None),
    }
    self.make_sink().publish(types.Variables(1, params), 10.0)
    received = self.make_source().get_variables(1, 10.0)
    assert received is not None
    assert received.policy_version == 1
    assert_trees_equal(received.params, params)

  def test_the_newest_version_wins_and_versions_never_fall(self):
    sink, source = self.make_sink(), self.make_source()
    seen = []
    for version in range(1, 30):
      sink.publish(
        types.Variables(version, {'w': np.full(5, version, np.int32)}), 10.0
      )
      variables = source.get_variables()
      if variables is not None:
        assert (variables.params['w'] == variables.policy_version).all()
        seen.append(variables.policy_version)
    assert seen == sorted(seen)
    assert source.get_variables(29, 10.0).policy_version == 29
    assert source.get_variables(30, 0.1) is None


def assert_trees_equal(ours: types.Nest, theirs: types.Nest) -> None:
  """Equal containers, dtypes, shapes and bytes."""
  assert type(ours) is type(theirs) or not isinstance(theirs, (dict, list))
  if isinstance(theirs, dict):
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
      assert_trees_equal(ours[key], value)
  elif isinstance(theirs, (list, tuple)):
    assert type(ours) is type(theirs) and len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
      assert_trees_equal(a, b)
  elif theirs is None:
    assert ours is None
  else:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert ours.tobytes() == theirs.tobytes()
