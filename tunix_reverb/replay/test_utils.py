"""Contract tests of the replay interfaces, for every implementation.

Inherit a mixin, implement its hooks, and pytest runs the contract. Also holds
small items for tests. Not imported by the library.
"""

from __future__ import annotations

import abc
import threading
import time

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
    permit_id=column('int64'),
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
    permit_id=np.arange(n, dtype=np.int64) + episode_id,
  )


class ListWriter(core.ItemWriter):
  """Keeps what it is given; refuses it while `full`."""

  def __init__(self) -> None:
    """Starts empty."""
    self.items: list[types.Trajectories] = []
    self.full = False

  def write(
    self, trajectories: types.Trajectories, timeout_s: float | None = None
  ) -> bool:
    """See base class."""
    if not self.full:
      self.items.append(trajectories)
    return not self.full

  def blocked_s(self) -> float:
    """See base class."""
    return 0.0

  def close(self, timeout_s: float) -> bool:
    """See base class."""
    return True


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

  def test_a_write_that_waits_ends_when_the_writer_is_closed(self):
    writer = self.make_writer()
    while writer.write(item(), 0.3):
      pass
    outcomes: list[object] = []

    def write() -> None:
      try:
        outcomes.append(writer.write(item(), 30.0))
      except RuntimeError as e:
        outcomes.append(e)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    start_s = time.monotonic()
    assert not writer.close(0.2)
    thread.join(10.0)
    assert time.monotonic() - start_s < 0.2 + _SLACK_S
    (outcome,) = outcomes
    assert isinstance(outcome, RuntimeError)
    try:
      writer.write(item(), 0.1)
    except RuntimeError as e:
      assert 'after close' in str(e)
    else:
      raise AssertionError('a closed writer took an item')

  def test_time_is_blocked_only_while_there_is_no_room(self):
    writer = self.make_writer()
    assert writer.write(item(0), 10.0)
    assert self.drain(1) == [0]
    assert writer.blocked_s() == 0.0
    assert writer.close(10.0)

  def test_items_of_any_lengths_arrive(self):
    writer = self.make_writer()
    assert writer.write(item(0, lengths=(1,)), 10.0)
    assert writer.write(item(1, lengths=(1, 700, 2), policy_version=0), 10.0)
    assert writer.write(item(2, lengths=(3,) * 200), 10.0)
    assert self.drain(3) == [0, 1, 2]
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
    assert_items_equal(sampled.trajectories, sent)
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

  def test_close_returns_what_was_received_once(self):
    sampler = self.make_sampler()
    self.fill([item(i) for i in range(3)])
    assert sampler.sample(20.0) is not None
    left = sampler.close()
    ids = [int(one.trajectories.episode_id[0]) for one in left]
    assert ids == [1, 2][: len(ids)]
    assert sampler.close() == []

  def test_a_sample_that_waits_ends_when_the_sampler_is_closed(self):
    sampler = self.make_sampler()
    outcomes: list[object] = []
    thread = threading.Thread(
      target=lambda: outcomes.append(sampler.sample(30.0)), daemon=True
    )
    thread.start()
    start_s = time.monotonic()
    sampler.close()
    thread.join(10.0)
    assert time.monotonic() - start_s < _SLACK_S
    assert outcomes == [None]

  def test_items_come_as_they_went_in_whatever_their_lengths(self):
    sampler = self.make_sampler()
    sent = [
      item(0, lengths=(1,)),
      item(1, lengths=(500,), policy_version=0),
      item(2, lengths=(2,) * 300, policy_version=2**31 - 1),
    ]
    self.fill(sent)
    for one in sent:
      sampled = sampler.sample(20.0)
      assert sampled is not None
      assert sampled.priority == one.policy_version.min()
      assert_items_equal(sampled.trajectories, one)
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
    assert sink.confirmed_version == 29
    assert source.get_variables(29, 10.0).policy_version == 29
    assert source.get_variables(30, 0.1) is None


def assert_items_equal(
  ours: types.Trajectories, theirs: types.Trajectories
) -> None:
  """The same columns, with equal dtypes, shapes and bytes."""
  left, right = specs.flatten_columns(ours), specs.flatten_columns(theirs)
  assert left.keys() == right.keys()
  for name, array in right.items():
    assert left[name].dtype == array.dtype, name
    assert left[name].shape == array.shape, name
    assert left[name].tobytes() == array.tobytes(), name


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
