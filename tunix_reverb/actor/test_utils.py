"""The contract of `core.Actor`, as tests to inherit.

Inherit the mixin, implement its hooks, and pytest runs the contract. Also
holds in-memory parts for tests. Not imported by the library.
"""

from __future__ import annotations

import abc
from typing import Any

import dm_env
import numpy as np
import tree

from tunix_reverb import core
from tunix_reverb import types


class RecordingAdder(core.Adder):
  """Keeps what it is given.

  Attributes:
    events: ('first', timestep), ('add', action, next timestep, extras) and
      ('reset',), in order.
  """

  def __init__(self) -> None:
    """Starts with no events."""
    self.events: list[tuple[Any, ...]] = []

  def add_first(self, timestep: dm_env.TimeStep) -> None:
    """See base class."""
    self.events.append(('first', timestep))

  def add(
    self, action: types.Nest, next_timestep: dm_env.TimeStep, extras: Any = ()
  ) -> None:
    """See base class."""
    extras = tree.map_structure(np.copy, dict(extras))
    self.events.append(('add', np.copy(action), next_timestep, extras))

  def reset(self) -> None:
    """See base class."""
    self.events.append(('reset',))


class ListWriter(core.ItemWriter):
  """Keeps every item it is given.

  Attributes:
    items: a list of `types.Trajectories`.
  """

  def __init__(self) -> None:
    """Starts with no items."""
    self.items: list[types.Trajectories] = []

  def write(
    self, trajectories: types.Trajectories, timeout_s: float | None = None
  ) -> bool:
    """See base class."""
    self.items.append(tree.map_structure(np.copy, trajectories))
    return True

  def blocked_s(self) -> float:
    """See base class."""
    return 0.0

  def close(self, timeout_s: float) -> bool:
    """See base class."""
    return True


class ActorContract(abc.ABC):
  """What every `core.Actor` does in a plain loop."""

  @abc.abstractmethod
  def make_environment(self) -> dm_env.Environment:
    """An environment whose episodes end."""

  @abc.abstractmethod
  def publish(self, policy_version: int) -> None:
    """Makes variables of this version the newest that the actor can get."""

  @abc.abstractmethod
  def make_actor(self, adder: core.Adder | None) -> core.Actor:
    """An actor in that environment that records through `adder`."""

  def test_actions_fit_the_spec(self):
    self.publish(1)
    actor, environment = self.make_actor(None), self.make_environment()
    spec = environment.action_spec()
    timestep = environment.reset()
    actor.observe_first(timestep)
    for _ in range(20):
      if timestep.last():
        timestep = environment.reset()
        actor.observe_first(timestep)
        continue
      action = np.asarray(actor.select_action(timestep.observation))
      assert action.shape == spec.shape
      spec.validate(action.astype(spec.dtype))
      timestep = environment.step(action)
      actor.observe(action, timestep)

  def test_what_happened_is_recorded_in_order(self):
    self.publish(1)
    adder = RecordingAdder()
    actor, environment = self.make_actor(adder), self.make_environment()
    expected: list[tuple[Any, ...]] = []
    for _ in range(2):
      timestep = environment.reset()
      actor.observe_first(timestep)
      expected.append(('first', timestep))
      while not timestep.last():
        action = actor.select_action(timestep.observation)
        timestep = environment.step(action)
        actor.observe(action, next_timestep=timestep)
        expected.append(('add', np.copy(action), timestep))
    assert len(adder.events) == len(expected)
    for event, wanted in zip(adder.events, expected):
      assert event[0] == wanted[0]
      assert event[len(wanted) - 1] is wanted[-1]
      if event[0] == 'add':
        np.testing.assert_array_equal(event[1], wanted[1])
        assert np.isfinite(event[3]['log_prob'])

  def test_the_recorded_version_is_that_of_the_policy_that_acted(self):
    self.publish(1)
    adder = RecordingAdder()
    actor, environment = self.make_actor(adder), self.make_environment()
    first = environment.reset()

    def act(update_before_observe: bool = False) -> int:
      actor.observe_first(first)
      action = actor.select_action(first.observation)
      if update_before_observe:
        actor.update()
      actor.observe(action, environment.reset())
      return int(adder.events[-1][3]['policy_version'])

    assert act() == 1
    self.publish(2)
    assert act() == 1, 'newer variables are taken by update() only'
    assert act(update_before_observe=True) == 1
    assert act() == 2
    actor.update()  # There is nothing newer: it changes nothing.
    assert act() == 2
    self.publish(3)
    actor.update(wait=True)
    assert act() == 3
