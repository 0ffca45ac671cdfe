"""What becomes of episodes of turns, alone and in groups."""

import threading
import time

import fake_permits
import numpy as np
import pytest
import turn_rig

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb.actor import groups

_NUM = 4


@pytest.fixture(scope='module')
def engine():
  """Compiled once."""
  return turn_rig.make_engine(_NUM)


@pytest.fixture
def make(engine):
  """Makes rigs of `_NUM` environments; closes them."""
  made = []

  def _make(**kwargs):
    for slot in range(_NUM):
      engine.cancel(slot)
    made.append(turn_rig.Rig(engine, **kwargs))
    return made[-1]

  yield _make
  for rig in made:
    rig.close()


def _trajectories(rig):
  """Every trajectory that was written, by itself."""
  found = []
  for item in rig.items:
    tokens = np.split(item.observation, np.cumsum(item.lengths + 1)[:-1])
    columns = [
      np.split(column, np.cumsum(item.lengths)[:-1])
      for column in (
        item.action,
        item.reward,
        item.discount,
        item.behaviour_log_prob,
        item.policy_version,
        item.loss_mask,
        item.turn_id,
      )
    ]
    found += zip(tokens, *columns)
  return found


def _expected(environment, episode):
  """(all tokens, where the policy wrote them, rewards), from its own log."""
  said, heard = environment.said[episode], environment.heard[episode]
  tokens, is_written, rewards = [], [], []
  for t, prompt in enumerate(said):
    tokens += prompt
    is_written += [False] * len(prompt)
    rewards += [0] * len(prompt)
    if t < len(heard):
      tokens += heard[t]
      is_written += [True] * len(heard[t])
      rewards += [0] * (len(heard[t]) - 1) + [t + 1]
  return tokens, is_written, rewards


@pytest.mark.parametrize('mode', ['synchronous', 'asynchronous'])
def test_items_hold_the_tokens_that_were_read_and_sampled(make, mode):
  rig = make(mode=mode)
  rig.run(lambda: len(rig.items) >= 40)
  expected = {}
  for environment in rig.environments.values():
    for episode in range(environment.episode):
      tokens, is_written, rewards = _expected(environment, episode)
      expected[tuple(tokens)] = (is_written, rewards, 1 + episode % 3)
  assert len(expected) > 30
  kinds = set()
  for trajectory in _trajectories(rig):
    tokens, action, reward, discount, log_prob, version, mask, turn = trajectory
    if tuple(tokens.tolist()) not in expected:
      continue  # Of the episode that ended last.
    is_written, rewards, kind = expected.pop(tuple(tokens.tolist()))
    kinds.add(kind)
    np.testing.assert_array_equal(action, tokens[1:])
    np.testing.assert_array_equal(mask, is_written[1:])
    np.testing.assert_array_equal(reward, rewards[1:])
    assert discount[-1] == (kind == 3) and (discount[:-1] == 1).all()
    assert (log_prob[mask] < 0).all() and (log_prob[~mask] == 0).all()
    assert (version == 1).all()
    # A turn's tokens share an id, and what is read has others.
    changes = np.flatnonzero(np.diff(mask.astype(int)))
    np.testing.assert_array_equal(np.diff(turn)[changes] > 0, True)
    assert (turn[mask] % 2 == 1).all() and (turn[~mask] % 2 == 0).all()
    assert len(set(turn[mask])) == kind
  assert not expected
  assert kinds == {1, 2, 3}
  for item in rig.items:
    assert item.actor_id.tolist() == [7]
    assert item.truncated.tolist() == [item.discount[-1] > 0]
    for name, spec in specs.flatten_columns(turn_rig.columns()).items():
      assert spec.accepts(specs.flatten_columns(item)[name]), name
  ids = [int(item.episode_id[0]) for item in rig.items]
  assert len(set(ids)) == len(ids)


def test_no_two_episodes_are_clones(make):
  """Environments play equal episodes; what they are told differs."""
  rig = make()
  rig.run(lambda: len(rig.items) >= 40)
  prompts = {}
  for environment in rig.environments.values():
    for said, heard in zip(environment.said, environment.heard):
      if heard:
        prompts.setdefault(tuple(said[0]), set()).add(str(heard))
  assert all(len(different) > 1 for different in prompts.values())
  # And a run of another seed differs from this, one of the same does not.
  answers = lambda rig: [e.heard[:5] for e in rig.environments.values()]
  again, other = make(), make(seed=4)
  again.run(lambda: len(again.items) >= 40)
  other.run(lambda: len(other.items) >= 40)
  assert answers(again) == answers(rig) != answers(other)


def test_an_episode_that_waits_for_its_tool_holds_up_nobody(make):
  gate = threading.Event()

  def before_step(environment):
    if environment.number == 2:
      gate.wait(20.0)

  rig = make(mode='asynchronous', before_step=before_step)
  rig.run(lambda: len(rig.items) >= 30)
  assert not rig.environments[2].heard[0]
  assert min(rig.environments[i].episode for i in (0, 1, 3)) > 5
  gate.set()
  rig.run(lambda: rig.environments[2].episode > 3)


def test_new_variables_are_taken_in_the_middle_of_a_turn(make):
  rig = make()

  def is_mixed():
    rig.variables.newest += 1  # With every token.
    return any(len(set(t[5][t[6]])) > 1 for t in _trajectories(rig))

  rig.run(is_mixed)
  for _, _, _, _, _, version, mask, turn in _trajectories(rig):
    assert (np.diff(version) >= 0).all()
    for one in set(turn[mask]):
      versions = version[turn == one]
      assert (np.diff(versions) == 1).all()


def test_no_episode_begins_without_a_permit(make):
  permits = fake_permits.Permits()
  rig = make(permits=permits)
  rig.step(5)
  assert permits.asked == _NUM == rig.loop.num_parked
  assert rig.loop.is_parked and rig.loop.actor_steps == 0
  permits.give(2)
  rig.run(lambda: len(rig.items) == 2)
  assert [e.heard[0] != [] for e in rig.environments.values()] == [
    True,
    True,
    False,
    False,
  ]
  assert {int(i.permit_id[0]) for i in rig.items} == {1000, 1001}
  rig.run(lambda: permits.asked == _NUM)
  # Of a version that has not come yet.
  permits.give(version=2)
  rig.step(5)
  assert rig.loop.is_parked and rig.loop.policy_version == 1
  rig.variables.newest = 2
  rig.run(lambda: len(rig.items) == 3)
  assert (rig.items[-1].policy_version == 2).all()
  permits.give(3)
  rig.run(lambda: not permits._come and rig.loop.num_parked <= 1)
  finished = {int(i.permit_id[0]) for i in rig.items}
  rig.loop.close()
  assert sorted(permits.returned) == sorted(set(permits.given) - finished)


def test_a_failed_environment_loses_its_episode_and_keeps_its_permit(make):
  failed = []

  def before_step(environment):
    if environment.number == 1 and environment.episode == 0:
      failed.append(environment)
      raise RuntimeError('a tool broke')

  permits = fake_permits.Permits()
  rig = make(permits=permits, before_step=before_step)
  rig.step(2)
  permits.give(_NUM)
  rig.run(lambda: len(rig.items) == _NUM)
  assert len(failed) == 1 and rig.replaced == failed
  assert sorted(int(i.permit_id[0]) for i in rig.items) == permits.given
  rig.run(lambda: permits.asked == _NUM)
  assert rig.environment.failures['error'] == 1


def test_an_episode_that_does_not_fit_is_told(make, engine, monkeypatch):
  rig = make()
  monkeypatch.setattr(engine, 'max_length', 6)
  with pytest.raises(errors.UserError, match=r'trajectory_length \(5\)'):
    rig.run(lambda: False)


def test_time_is_accounted_for_by_cause(make):
  permits = fake_permits.Permits()
  rig = make(permits=permits)
  rig.step(3)
  rig.loop.account.take()
  permits.take = lambda timeout_s: time.sleep(0.02) or []
  rig.step(3)
  fractions = rig.loop.account.take()
  assert set(fractions) == {'environment', 'act', 'adder', 'permit', 'other'}
  assert fractions['permit'] > 0


# Groups.


def test_a_group_plays_the_same_task_and_is_one_item(make):
  rig = make(group_size=2, advantage='grpo')
  rig.run(lambda: len(rig.items) >= 20)
  spec = turn_rig.columns(has_advantage=True)
  differ = 0
  for item in rig.items:
    assert item.lengths.size == 2
    for name, column in specs.flatten_columns(spec).items():
      assert column.accepts(specs.flatten_columns(item)[name]), name
    of_each = np.split(item.advantage, item.lengths[:1])
    returns = [r.sum() for r in np.split(item.reward, item.lengths[:1])]
    expected = groups.advantages(returns, 'grpo')
    assert [a[0] for a in of_each] == expected.tolist()
    assert all((a == a[0]).all() for a in of_each)
    # The same prompt, and not the same answers.
    first, second = np.split(item.observation, item.lengths[:1] + 1)
    size = int(np.argmax(item.loss_mask)) + 1
    np.testing.assert_array_equal(first[:size], second[:size])
    differ += not np.array_equal(first, second)
  assert differ > 15


def test_groups_take_one_permit_and_wait_for_all_their_members(make):
  gate = threading.Event()

  def before_step(environment):
    if environment.number == 0:
      gate.wait(20.0)

  permits = fake_permits.Permits()
  rig = make(
    mode='asynchronous',
    permits=permits,
    before_step=before_step,
    group_size=2,
    advantage='rloo',
  )
  rig.run(lambda: permits.asked == 2)
  assert rig.loop.num_parked == _NUM
  permits.give(2)
  rig.run(lambda: permits.asked == 1)  # Of the second group.
  (item,) = rig.items
  assert item.permit_id.tolist() == [1001, 0]
  # Its other member is done, and waits for the first.
  rig.run(lambda: rig.environments[1].episode == 1)
  rig.step(3)
  assert not rig.engine.has_work
  gate.set()
  rig.run(lambda: len(rig.items) == 2)
  assert rig.items[1].permit_id.tolist() == [1000, 0]


def _fails(*when):
  """Raises where (environment, episode) is among `when`."""

  def before_step(environment):
    if (environment.number, environment.episode) in when:
      raise RuntimeError('a tool broke')

  return before_step


def test_a_member_that_fails_leaves_its_group_for_this_task(make):
  permits = fake_permits.Permits()
  rig = make(
    permits=permits,
    before_step=_fails((1, 0)),
    group_size=_NUM,
    advantage='grpo',
  )
  rig.step(2)
  permits.give()
  rig.run(lambda: permits.asked)
  permits.give()
  rig.run(lambda: len(rig.items) == 2)
  assert [item.lengths.size for item in rig.items] == [_NUM - 1, _NUM]
  assert [int(item.permit_id[0]) for item in rig.items] == permits.given
  # All play the same task again.
  parts = np.cumsum(rig.items[1].lengths)[:-1] + np.arange(1, _NUM)
  prompts = {
    str(tokens[: 1 + int(np.argmax(mask))])
    for tokens, mask in zip(
      np.split(rig.items[1].observation, parts),
      np.split(rig.items[1].loss_mask, parts - np.arange(1, _NUM)),
    )
  }
  assert len(prompts) == 1


def test_a_group_of_too_few_is_dropped_and_its_permit_is_used_again(make):
  permits = fake_permits.Permits()
  rig = make(
    permits=permits,
    before_step=_fails((1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)),
    group_size=_NUM,
    advantage='grpo',
  )
  rig.step(2)
  permits.give()
  rig.run(lambda: rig.items)
  (item,) = rig.items
  # One was left of the first task, none of the second.
  assert item.permit_id.tolist() == [1000, 0, 0, 0]
  assert {e.episode for e in rig.environments.values()} <= {2, 3}


def test_groups_with_failures_everywhere_go_on(make):
  """No deadlock, whoever fails when; every permit is used or returned."""
  random, lock = np.random.default_rng(0), threading.Lock()

  def before_step(environment):
    with lock:
      fails = random.random() < 0.2
    if fails:
      raise RuntimeError('a tool broke')

  permits = fake_permits.Permits()
  rig = make(
    mode='asynchronous',
    permits=permits,
    before_step=before_step,
    group_size=2,
    advantage='grpo',
  )

  def is_enough():
    if permits.asked:
      permits.give(permits.asked)
    return len(rig.items) >= 25

  rig.run(is_enough)
  used = [int(item.permit_id[0]) for item in rig.items]
  assert len(set(used)) == len(used)
  assert rig.environment.failures['error'] > 5
  rig.loop.close()
  assert sorted([*used, *permits.returned]) == permits.given


def test_in_turn_what_is_generated_does_not_depend_on_who_is_fast(make):
  def slow(number):
    def before_step(environment):
      if environment.number == number:
        time.sleep(0.005)

    return before_step

  def played(before_step):
    permits = fake_permits.Permits()
    rig = make(
      mode='asynchronous',
      permits=permits,
      before_step=before_step,
      in_turn=True,
    )

    def is_enough():
      if permits.asked:
        permits.give(permits.asked)
      return len(rig.items) >= 16

    rig.run(is_enough)
    return {int(i.permit_id[0]): i.observation.tolist() for i in rig.items}

  first, second = played(slow(0)), played(slow(3))
  common = first.keys() & second.keys()
  assert len(common) >= 12
  assert all(first[i] == second[i] for i in common)


@pytest.mark.parametrize('kind', ['grpo', 'rloo'])
def test_advantages(kind):
  result = groups.advantages([1.0, 0.0, 0.0, 1.0], kind)
  size = 1.0 if kind == 'grpo' else 2 / 3
  np.testing.assert_allclose(result, size * np.array([1, -1, -1, 1]), rtol=1e-5)
  assert result.dtype == np.float32
  # Nothing to tell them apart.
  assert groups.advantages([0.5, 0.5], kind).tolist() == [0, 0]
  np.testing.assert_allclose(
    groups.advantages([3, 1, 2], 'rloo'), [1.5, -1.5, 0]
  )


def test_advantages_of_another_kind_are_refused():
  with pytest.raises(ValueError, match='must be grpo or rloo'):
    groups.advantages([1.0, 2.0], 'none')
