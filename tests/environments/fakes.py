"""Environments for tests: a user's own, broken, slow and oddly shaped ones."""

import collections
import threading

import dm_env
from dm_env import specs
import gymnasium
from gymnasium import spaces
import numpy as np


class Counter(dm_env.Environment):
  """Observes how many transitions have passed; episodes of `length`.

  The reward is the count; the last discount is `last_discount`.
  """

  def __init__(self, *, seed: int = 0, length: int = 3, last_discount=0.0):
    self.seed = seed
    self.closed = False
    self._length = length
    self._last_discount = last_discount
    self._count = length

  def reset(self):
    self._count = 0
    return dm_env.restart(self._observation())

  def step(self, action):
    if self._count == self._length:
      return self.reset()
    self.action_spec().validate(action)
    self._count += 1
    observation, reward = self._observation(), float(self._count)
    if self._count == self._length:
      return dm_env.TimeStep(
        dm_env.StepType.LAST, reward, self._last_discount, observation
      )
    return dm_env.transition(reward, observation)

  def _observation(self):
    return np.array([self._count, self.seed], np.float64)

  def observation_spec(self):
    return specs.Array((2,), np.float64)

  def action_spec(self):
    return specs.DiscreteArray(4, dtype=np.int64)

  def close(self):
    self.closed = True


class Nested(Counter):
  """An OrderedDict with a tuple inside, scalars and several dtypes."""

  def _observation(self):
    return collections.OrderedDict(
      z=(np.float64(self._count), np.array([[True, False]])),
      a=np.full((2, 3), self._count, np.uint8),
    )

  def observation_spec(self):
    return collections.OrderedDict(
      z=(specs.Array((), np.float64), specs.Array((1, 2), np.bool_)),
      a=specs.BoundedArray((2, 3), np.uint8, 0, 255),
    )


class Acting(Counter):
  """Remembers the actions it was given, of any spec."""

  def __init__(self, spec, **kwargs):
    super().__init__(**kwargs)
    self._spec = spec
    self.actions = []

  def action_spec(self):
    return self._spec

  def step(self, action):
    self.actions.append(action)
    return super().step(action)


class Raising(Counter):
  """Raises in `step` number `at` of its life, counted from 1."""

  def __init__(self, *, at: int = 2, error=RuntimeError, **kwargs):
    super().__init__(**kwargs)
    self._left = at
    self._error = error

  def step(self, action):
    self._left -= 1
    if self._left == 0:
      raise self._error('broken on purpose')
    return super().step(action)


class Blocking(Counter):
  """Its `step` waits until `gate` is set."""

  def __init__(self, gate: threading.Event, **kwargs):
    super().__init__(**kwargs)
    self._gate = gate

  def step(self, action):
    self._gate.wait(30.0)
    return super().step(action)


class Wrong(Counter):
  """Breaks the contract in many ways, one per episode."""

  def __init__(self, *, seed: int = 0):
    super().__init__(seed=seed)
    self._episode = 0

  def reset(self):
    self._episode += 1
    return super().reset()

  def observation_spec(self):
    shape = (3,) if self._episode == 6 else (2,)
    return specs.BoundedArray(shape, np.float64, 0, 100)

  def step(self, action):
    timestep = super().step(action)
    if timestep.first():
      if self._episode == 5:
        return timestep._replace(reward=0.0)
      return timestep
    bad = {
      1: {'observation': np.zeros(3)},
      2: {'observation': np.full(2, 101.0)},
      3: {'reward': float('nan')},
      4: {'discount': 1.5},
      7: {'observation': np.zeros(2, np.float32)},
    }
    return timestep._replace(**bad.get(self._episode, {}))


class Gym(gymnasium.Env):
  """A Gymnasium environment of any spaces; observes its own last action.

  Ends after `length` steps, in the way `ending` says: 'terminated',
  'truncated', 'both' or 'neither'.
  """

  def __init__(
    self,
    observation_space=None,
    action_space=None,
    ending: str = 'terminated',
    length: int = 2,
  ):
    self.observation_space = observation_space or spaces.Box(
      -np.inf, np.inf, (1,), np.float64
    )
    self.action_space = spaces.Discrete(3, start=-1)
    if action_space is not None:  # The length of some is zero.
      self.action_space = action_space
    self.ending, self.length = ending, length
    self.actions, self.seeds, self.count = [], [], 0

  def _observation(self):
    if isinstance(self.observation_space, spaces.Box):
      return np.full(
        self.observation_space.shape, self.count, self.observation_space.dtype
      )
    return self.observation_space.sample()

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    if seed is not None:
      self.observation_space.seed(seed)
    self.seeds.append(seed)
    self.count = 0
    return self._observation(), {}

  def step(self, action):
    assert self.action_space.contains(action), action
    self.actions.append(action)
    self.count += 1
    over = self.count >= self.length
    return (
      self._observation(),
      1.0,
      over and self.ending in ('terminated', 'both'),
      over and self.ending in ('truncated', 'both'),
      {},
    )


def make_counter(*, seed):
  return Counter(seed=seed)


def make_raising(*, seed):
  return Raising(seed=seed, at=5)


def make_wrong(*, seed):
  return Wrong(seed=seed)


def make_nothing(*, seed):
  return f'not an environment, seed {seed}'
