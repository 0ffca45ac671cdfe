"""No trajectory without a permit, and nobody waits for somebody else's."""

import collections
import itertools
import threading
import time

import dm_env
from dm_env import specs as dm_specs
import fake_permits
import jax
import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import admission
from tunix_reverb.actor import policy as policy_lib
from tunix_reverb.actor import test_utils
from tunix_reverb.environments import vector
from tunix_reverb.networks import policy_network
from tunix_reverb.replay import adder as adder_lib

_LENGTH = 4  # Most transitions of a trajectory.


class _Environment(dm_env.Environment):
  """Episodes of 1 to 9 transitions; observes (number, episode, step)."""

  def __init__(self, number, before_step=lambda number: None):
    self.number = number
    self.steps = 0
    self._rng = np.random.default_rng(number)
    self._before_step = before_step
    self._episode = -1

  def reset(self):
    self._episode += 1
    self._step, self._left = 0, int(self._rng.integers(1, 10))
    return dm_env.restart(self._observation())

  def step(self, action):
    self._before_step(self.number)
    self.steps += 1
    self._step += 1
    self._left -= 1
    kind = dm_env.StepType.LAST if not self._left else dm_env.StepType.MID
    return dm_env.TimeStep(kind, float(action), 1.0, self._observation())

  def _observation(self):
    return np.array([self.number, self._episode, self._step], np.float32)

  def observation_spec(self):
    return dm_specs.Array((3,), np.float32)

  def action_spec(self):
    return dm_specs.DiscreteArray(3)


class _Variables(core.VariableSource):
  """Serves `params` as the version `newest`."""

  def __init__(self, params):
    self.params = params
    self.newest = 1

  def get_variables(self, min_version=0, timeout_s=0.0):
    if self.newest < min_version:
      return None
    return types.Variables(self.newest, self.params)


class _Rig:
  """A loop over N logged environments, and everything around it."""

  def __init__(self, num=3, *, mode='synchronous', in_turn=False, **kwargs):
    self.environments = []
    environment = self._make_environment(num, mode, **kwargs)
    spec = specs.make_environment_spec(_Environment(0))
    network = policy_network.make_policy_network(
      spec, hidden_sizes=(4,), core='gru', core_size=3
    )
    self.writer = test_utils.ListWriter()
    self.permits = fake_permits.Permits()
    params = network.init(jax.random.PRNGKey(0))
    self.variables = _Variables(jax.tree_util.tree_map(np.array, params))
    self.adder = adder_lib.TrajectoryAdder(
      columns=specs.trajectories_spec(spec, network.core_state_spec()),
      num_environments=num,
      trajectory_length=_LENGTH,
      writer=self.writer,
      actor_id=0,
      item_transitions=1,
      item_age_s=1e9,
    )
    self.loop = admission.AdmittedLoop(
      environment=environment,
      policy=policy_lib.BatchedPolicy(
        network, num_environments=num, seed=0, independent=True
      ),
      adder=self.adder,
      variables=self.variables,
      variable_update_period_s=1e9,
      permits=self.permits,
      in_turn=in_turn,
    )
    self.environment = environment
    assert self.loop.wait_for_variables(1.0)

  def _make_environment(self, num, mode, before_step=lambda number: None):
    def make(number):
      environment = _Environment(number, before_step)
      self.environments.append(environment)
      return environment

    factories = [lambda i=i: make(i) for i in range(num)]
    if mode == 'synchronous':
      return vector.SynchronousVectorEnvironment(factories)
    return vector.AsynchronousVectorEnvironment(factories, timeout_s=30.0)

  def steps(self):
    """Steps that each environment has taken."""
    return [environment.steps for environment in self.environments]

  def settle(self):
    """Steps until nothing moves without another permit."""
    deadline_s = time.monotonic() + 20.0
    self.loop.step(0.1)
    while not self.loop.is_parked:
      assert time.monotonic() < deadline_s
      self.loop.step(0.1)

  def trajectories(self):
    """By environment: (permit, episode, first step, transitions, versions)."""
    found = collections.defaultdict(list)
    for item in self.writer.items:
      assert item.lengths.size == 1
      number, episode, step = item.observation[0].astype(int)
      found[int(number)].append(
        (
          int(item.permit_id[0]),
          int(episode),
          int(step),
          int(item.lengths[0]),
          set(item.policy_version.tolist()),
        )
      )
    return found


@pytest.fixture
def make():
  """Makes rigs; closes their environments after the test."""
  rigs = []

  def _make(*args, **kwargs):
    rigs.append(_Rig(*args, **kwargs))
    return rigs[-1]

  yield _make
  for rig in rigs:
    rig.environment.close()


def test_no_action_is_sent_before_a_permit_has_come(make):
  rig = make()
  for _ in range(5):
    rig.loop.step(0.0)
  assert rig.steps() == [0, 0, 0]
  assert rig.permits.asked == 3, 'one for each, and no more'
  assert rig.loop.is_parked and rig.loop.actor_steps == 0


def test_the_others_go_on_and_who_was_parked_first_is_served_first(make):
  rig = make()
  rig.loop.step(0.0)
  rig.permits.give(1)
  rig.settle()
  assert rig.steps()[0] > 0 and rig.steps()[1:] == [0, 0]
  assert rig.permits.asked == 3, 'the first needs another one'
  before = rig.steps()
  rig.permits.give(2)
  rig.settle()
  assert rig.steps()[0] == before[0]
  assert min(rig.steps()[1:]) > 0


def test_every_trajectory_has_a_permit_of_its_own(make):
  rig = make()
  for _ in range(40):
    rig.settle()
    assert rig.permits.asked == 3
    rig.permits.give(2)
  rig.settle()
  found = [t for ts in rig.trajectories().values() for t in ts]
  assert sorted(t[0] for t in found) == sorted(rig.permits.given)
  for trajectories in rig.trajectories().values():
    # Whole episodes, cut where they are too long, in order, without a gap.
    for one, following in itertools.pairwise(trajectories):
      if following[1] == one[1]:
        assert (following[2], one[3]) == (one[2] + one[3], _LENGTH)
      else:
        assert following[1:3] == (one[1] + 1, 0)
  assert any(t[2] > 0 for t in found), 'none was cut'


def test_a_permit_waits_for_variables_as_new_as_itself(make):
  rig = make()
  rig.loop.step(0.0)
  rig.permits.give(1, version=1)
  rig.permits.give(1, version=5)
  for _ in range(30):
    rig.loop.step(0.0)
  assert rig.steps()[0] > 0 and rig.steps()[1] == 0
  rig.variables.newest = 4
  for _ in range(5):
    rig.loop.step(0.0)
  assert rig.steps()[1] == 0
  rig.variables.newest = 6
  rig.settle()
  assert [t[4] for t in rig.trajectories()[1]] == [{6}]


def test_a_failed_environment_keeps_its_permit(make):
  failures = iter([False, False, True])

  def before_step(number):
    if number == 1 and next(failures, False):
      raise RuntimeError('broken on purpose')

  rig = make(2, before_step=before_step)
  rig.loop.step(0.0)
  rig.permits.give(2)
  rig.settle()
  rig.permits.give(2)
  rig.settle()
  assert sum(rig.environment.failures.values()) == 1
  found = [t[0] for ts in rig.trajectories().values() for t in ts]
  assert sorted(found) == rig.permits.given


def test_permits_that_were_not_used_are_given_back(make):
  entered, release = threading.Event(), threading.Event()

  def before_step(number):
    if number == 2:
      entered.set()
      release.wait(30.0)

  rig = make(3, mode='asynchronous', before_step=before_step)
  while rig.permits.asked < 3:
    rig.loop.step(0.1)
  rig.permits.give(2)
  while not rig.writer.items:
    rig.loop.step(0.1)
  rig.permits.give(1, version=9)  # Which nobody can use yet.
  rig.permits.give(1, version=9)
  rig.loop.step(0.0)
  used = {int(item.permit_id[0]) for item in rig.writer.items}
  rig.loop.close()
  release.set()
  assert sorted(rig.permits.returned) == sorted(set(rig.permits.given) - used)
  assert len(rig.permits.returned) >= 2


def test_waiting_environments_do_not_stop_the_one_at_work(make):
  rig = make(3, mode='asynchronous')
  while rig.permits.asked < 3:
    rig.loop.step(0.1)
  rig.permits.give(1)
  begin_s = time.monotonic()
  rig.settle()
  assert time.monotonic() - begin_s < 10.0
  assert rig.loop.num_parked == 3 and len(rig.writer.items) == 1


@pytest.mark.parametrize('mode', ['synchronous', 'asynchronous'])
def test_in_turn_what_is_generated_depends_on_no_timing(make, mode):
  delays = iter(np.random.default_rng(0).uniform(0.0, 0.004, 10_000))
  rigs = [
    make(3, in_turn=True),
    make(
      3,
      mode=mode,
      in_turn=True,
      before_step=lambda number: time.sleep(next(delays)),
    ),
  ]
  # All that is asked for at once, and one by one.
  for rig, most in zip(rigs, (3, 1)):
    deadline_s = time.monotonic() + 60.0
    while len(rig.writer.items) < 50:
      assert time.monotonic() < deadline_s
      if rig.permits.asked:
        rig.permits.give(min(most, rig.permits.asked))
      rig.loop.step(0.05)
  by_permit = [
    {int(item.permit_id[0]): item for item in rig.writer.items} for rig in rigs
  ]
  assert by_permit[0].keys() >= set(range(1000, 1040))
  for permit_id in range(1000, 1040):
    ours, theirs = (found[permit_id] for found in by_permit)
    for name in ('observation', 'action', 'behaviour_log_prob', 'core_state'):
      jax.tree_util.tree_map(
        np.testing.assert_array_equal,
        getattr(ours, name),
        getattr(theirs, name),
      )
