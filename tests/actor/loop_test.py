"""The actor's loop against what its environments themselves saw.

Every environment here keeps a log, and every observation says where it comes
from; what was stored is looked up in that log.
"""

import dataclasses
import threading
import time

import dm_env
from dm_env import specs as dm_specs
import jax
import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import loop as loop_lib
from tunix_reverb.actor import policy as policy_lib
from tunix_reverb.actor import test_utils
from tunix_reverb.environments import asynchronous
from tunix_reverb.environments import canonical
from tunix_reverb.environments import factory
from tunix_reverb.networks import policy_network
from tunix_reverb.replay import adder as adder_lib

_LENGTH = 4  # Most transitions of a trajectory.
_NUM = 4  # Environments.


@dataclasses.dataclass
class _Episode:
  """What one episode of one environment really was."""

  observations: list
  actions: list = dataclasses.field(default_factory=list)
  rewards: list = dataclasses.field(default_factory=list)
  discounts: list = dataclasses.field(default_factory=list)
  ended: bool = False


# Episodes by environment number; a new environment takes the next number.
_LOG: list[list[_Episode]] = []


class _Logged(dm_env.Environment):
  """Observes (environment number, episode number, step); keeps a log.

  Episodes have 1 to 9 transitions; every other one is a truncation. Rewards
  and discounts are random. Raises in call number `raise_at`, if that is > 0.
  """

  def __init__(self, seed=0, raise_at=0, before_step=lambda number: None):
    self.number = len(_LOG)
    self._log = []
    _LOG.append(self._log)
    self._rng = np.random.default_rng([seed, self.number])
    self._left = -1
    self._calls_left = raise_at
    self._before_step = before_step

  def reset(self):
    self._left = int(self._rng.integers(1, 10))
    self._log.append(_Episode([self._observation(len(self._log), 0)]))
    return dm_env.restart(self._log[-1].observations[0])

  def step(self, action):
    self._before_step(self.number)
    self._calls_left -= 1
    if self._calls_left == 0:
      raise RuntimeError('broken on purpose')
    if self._left <= 0:
      return self.reset()
    episode = self._log[-1]
    self._left -= 1
    reward = float(np.float32(self._rng.normal()))
    discount = float(np.float32(self._rng.uniform(0.1, 1.0)))
    if not self._left and len(self._log) % 2:
      discount = 0.0
    step = len(episode.actions) + 1
    episode.observations.append(self._observation(len(self._log) - 1, step))
    episode.actions.append(int(action))
    episode.rewards.append(reward)
    episode.discounts.append(discount)
    episode.ended = not self._left
    kind = dm_env.StepType.LAST if episode.ended else dm_env.StepType.MID
    return dm_env.TimeStep(kind, reward, discount, episode.observations[-1])

  def _observation(self, episode, step):
    return np.array([self.number, episode, step], np.float64)

  def observation_spec(self):
    return dm_specs.Array((3,), np.float64)

  def action_spec(self):
    return dm_specs.DiscreteArray(3)


def make_logged(*, seed):
  """For `module:factory`."""
  return _Logged(seed)


_broken_once = threading.Event()


def make_breaking(*, seed):
  """The first one made breaks in its 12th step."""
  first, _ = not _broken_once.is_set(), _broken_once.set()
  return _Logged(seed, raise_at=12 if first else 0)


def make_slow(*, seed):
  """Every other one takes 2 ms for a step, so that few answer together."""
  return _Logged(seed, before_step=lambda number: time.sleep(number % 2 / 500))


class _Versions(core.VariableSource):
  """A new version at every `every`-th question; each has other params."""

  def __init__(self, network, every=1_000_000):
    self._params = jax.device_get(network.init(jax.random.PRNGKey(1)))
    self._every = every
    self._asked = 0
    self.by_version = {}

  def get_variables(self, min_version=0, timeout_s=0.0):
    self._asked += 1
    version = 1 + self._asked // self._every
    if version < min_version:
      return None
    # Away from the nearly uniform start, so that the versions differ.
    scale = np.float32(2.0 + version % 3)
    params = jax.tree_util.tree_map(lambda p: p * scale, self._params)
    self.by_version[version] = params
    return types.Variables(version, params)


class _Setup:
  """A loop over `environment` and everything around it."""

  def __init__(self, environment, spec, *, core='none', every=1_000_000):
    self.network = policy_network.make_policy_network(
      spec, hidden_sizes=(8,), core=core, core_size=4
    )
    self.writer = test_utils.ListWriter()
    num = environment.num_environments
    self.adder = adder_lib.TrajectoryAdder(
      columns=specs.trajectories_spec(spec, self.network.core_state_spec()),
      num_environments=num,
      trajectory_length=_LENGTH,
      writer=self.writer,
      actor_id=3,
      item_transitions=16,
      item_age_s=1e9,
    )
    self.variables = _Versions(self.network, every)
    self.loop = loop_lib.ActorLoop(
      environment=environment,
      policy=policy_lib.BatchedPolicy(
        self.network, num_environments=num, seed=0
      ),
      adder=self.adder,
      variables=self.variables,
      variable_update_period_s=0.0,
    )
    assert self.loop.wait_for_variables(1.0)

  def run(self, actor_steps):
    self.loop.run(lambda: self.loop.actor_steps < actor_steps)


def _spec(name):
  return factory.environment_spec(name, seed=0)


@pytest.fixture
def make(request):
  """Makes a `_Setup`; closes its environments after the test."""
  _LOG.clear()
  _broken_once.clear()
  made = []

  def _make(name, *, mode='vectorised', **kwargs):
    name = name if ':' in name or name == 'catch' else f'{__name__}:{name}'
    environment = factory.make_vector(
      name, num_environments=_NUM, mode=mode, seed=7, timeout_s=10.0
    )
    made.append(environment)
    return _Setup(environment, _spec(name), **kwargs)

  yield _make
  for environment in made:
    environment.close()


def _trajectories(items):
  """Every trajectory of `items` as a dict of its own columns."""
  for item in items:
    ends = np.cumsum(item.lengths)
    for n, (end, length) in enumerate(zip(ends, item.lengths)):
      transitions = slice(end - length, end)
      timesteps = slice(end - length + n, end + n + 1)
      yield {
        'observation': item.observation[timesteps],
        'core_state': jax.tree_util.tree_map(
          lambda s, n=n: s[n], item.core_state
        ),
        'truncated': item.truncated[n],
        'episode_id': item.episode_id[n],
        **{
          name: getattr(item, name)[transitions]
          for name in (
            'action',
            'reward',
            'discount',
            'behaviour_log_prob',
            'policy_version',
            'loss_mask',
          )
        },
      }


def _check_against_log(items, *, num_whole):
  """Everything stored happened, and every ended episode is stored once."""
  seen = {}
  for one in _trajectories(items):
    number, index, start = one['observation'][0].astype(int)
    episode = _LOG[number][index]
    end = start + one['action'].size
    np.testing.assert_array_equal(
      one['observation'], episode.observations[start : end + 1]
    )
    for ours, theirs in (
      ('action', episode.actions),
      ('reward', episode.rewards),
      ('discount', episode.discounts),
    ):
      np.testing.assert_array_equal(one[ours], theirs[start:end])
    at_end = episode.ended and end == len(episode.actions)
    assert one['truncated'] == (at_end and episode.discounts[-1] > 0)
    assert one['loss_mask'].all()
    parts = seen.setdefault((number, index), [])
    assert start == sum(p[1] for p in parts), 'a part is missing or twice'
    parts.append((one['episode_id'], end - start))
  for parts in seen.values():
    assert len({episode_id for episode_id, _ in parts}) == 1
  ids = [parts[0][0] for parts in seen.values()]
  assert len(set(ids)) == len(ids), 'two episodes share an id'
  whole = 0
  for number, episodes in enumerate(_LOG):
    for index, episode in enumerate(episodes):
      stored = sum(length for _, length in seen.get((number, index), []))
      whole += episode.ended and stored == len(episode.actions)
      # The answer to an environment's latest action may be under way.
      if not episode.ended or index == len(episodes) - 1:
        assert stored in (len(episode.actions), *range(0, 10, _LENGTH))
      else:
        assert stored == len(episode.actions)
  assert whole >= num_whole


def _check_log_probs(setup):
  """Log-probabilities are those of the stored version and core state."""
  network = setup.network

  @jax.jit
  def step(params, observation, core_state, is_first, action):
    batched = lambda nest: jax.tree_util.tree_map(lambda x: x[None], nest)
    outputs, _, core_state = network.step(
      params, observation[None], batched(core_state), is_first[None]
    )
    log_prob = network.distribution.log_prob(outputs, action[None])[0]
    return log_prob, jax.tree_util.tree_map(lambda s: s[0], core_state)

  mixed = 0
  for one in _trajectories(setup.writer.items):
    core_state = one['core_state']
    starts = one['observation'][0][2] == 0
    if starts:
      assert not any(np.any(s) for s in jax.tree_util.tree_leaves(core_state))
    versions = one['policy_version']
    assert (np.diff(versions) >= 0).all()
    mixed += versions[0] != versions[-1]
    for t, version in enumerate(versions):
      log_prob, core_state = step(
        setup.variables.by_version[int(version)],
        one['observation'][t],
        core_state,
        np.bool_(starts and t == 0),
        one['action'][t],
      )
      np.testing.assert_allclose(
        one['behaviour_log_prob'][t], log_prob, rtol=1e-4, atol=1e-5
      )
  return mixed


@pytest.mark.parametrize('mode', ['vectorised', 'asynchronous'])
@pytest.mark.parametrize('core', ['none', 'lstm'])
def test_what_is_stored_is_what_happened(make, mode, core):
  setup = make('make_slow', mode=mode, core=core, every=3)
  setup.run(160)
  assert setup.loop.policy_version > 5
  _check_against_log(setup.writer.items, num_whole=12)
  assert _check_log_probs(setup) > 5, 'no version changed in mid-trajectory'


def test_some_answer_at_one_time_and_all_at_another(make):
  """The same as above where calls of all and of some alternate."""
  gate = threading.Event()
  gate.set()

  def before_step(number):
    if number == 0:
      gate.wait(10.0)

  _LOG.clear()
  environment = asynchronous.AsynchronousVectorEnvironment(
    [lambda: _Logged(before_step=before_step)] * _NUM, timeout_s=20.0
  )
  try:
    setup = _Setup(
      environment,
      specs.make_environment_spec(canonical.canonicalise(_Logged())),
      core='gru',
      every=4,
    )
    for number in range(120):
      if number % 10 == 3:
        gate.clear()
      if number % 10 == 8:
        gate.set()
      setup.loop.step(timeout_s=1.0)
    setup.adder.flush()
  finally:
    gate.set()
    environment.close()
  _check_against_log(setup.writer.items, num_whole=8)
  assert _check_log_probs(setup) > 3


@pytest.mark.parametrize('mode', ['vectorised', 'asynchronous'])
def test_the_episode_of_an_environment_that_breaks_is_cut(make, mode):
  setup = make('make_breaking', mode=mode)
  setup.run(160)
  assert sum(setup.loop._environment.failures.values()) == 1
  _check_against_log(setup.writer.items, num_whole=12)
  _check_log_probs(setup)


def test_catch_episodes_are_stored_whole(make):
  setup = make('catch')
  setup.run(30 * _NUM)
  items = setup.writer.items
  lengths = np.concatenate([i.lengths for i in items])
  # 30 steps of each: three episodes of FIRST and 9 transitions, as 4 + 4 + 1.
  assert sorted(lengths.tolist()) == 3 * _NUM * [1] + 6 * _NUM * [4]
  episodes = setup.loop.statistics.take()
  assert [length for _, _, length in episodes] == 3 * _NUM * [9]
  stored = sum(float(i.reward.sum()) for i in items)
  assert stored == sum(value for _, value, _ in episodes)
  assert setup.loop.statistics.take() == []


def test_a_slow_environment_does_not_hold_up_the_others():
  gate = threading.Event()
  _LOG.clear()
  blocked = lambda number: number or gate.wait(20.0)
  environment = asynchronous.AsynchronousVectorEnvironment(
    [lambda: _Logged(before_step=blocked)] * _NUM, timeout_s=30.0
  )
  try:
    setup = _Setup(
      environment,
      specs.make_environment_spec(canonical.canonicalise(_Logged())),
    )
    deadline_s = time.monotonic() + 20.0
    steps = lambda number: sum(len(e.actions) for e in _LOG[number])
    while min(steps(n) for n in range(1, _NUM)) < 40:
      assert time.monotonic() < deadline_s
      setup.loop.step(timeout_s=0.5)
    assert steps(0) == 0
    setup.adder.flush()
    _check_against_log(setup.writer.items, num_whole=9)
    gate.set()
    while steps(0) < 20:
      assert time.monotonic() < deadline_s
      setup.loop.step(timeout_s=0.5)
    setup.adder.flush()
  finally:
    gate.set()
    environment.close()
  _check_against_log(setup.writer.items, num_whole=12)
  _check_log_probs(setup)


def test_nothing_ready_is_told_and_nothing_is_counted(make):
  setup = make('make_logged')
  assert setup.loop.step(timeout_s=1.0)
  steps = setup.loop.actor_steps
  setup.loop._environment.close()
  assert not setup.loop.step(timeout_s=0.01)
  assert setup.loop.actor_steps == steps == _NUM


def test_no_variables_by_the_deadline_is_told(make):
  setup = make('make_logged')
  setup.variables.get_variables = lambda *_: None
  setup.loop._policy.policy_version = 0
  assert not setup.loop.wait_for_variables(0.0)
  assert setup.loop.policy_version == 0
