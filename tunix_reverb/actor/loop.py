"""The actor's loop: receive timesteps, act, record, step.

One loop serves fast environments, all of which answer together, and slow
ones, of which those that are ready are served while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable
import time

import dm_env
import numpy as np

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.actor import policy as policy_lib
from tunix_reverb.telemetry import timing

_FIRST = int(dm_env.StepType.FIRST)
_LAST = int(dm_env.StepType.LAST)


class EpisodeStatistics:
  """Returns and lengths of the episodes of N environments."""

  def __init__(self, num_environments: int):
    """Counts for N environments."""
    self._return = np.zeros(num_environments)
    self._length = np.zeros(num_environments, np.int64)
    self.finished: list[tuple[int, float, int]] = []

  def observe(self, ids: np.ndarray, timestep: dm_env.TimeStep) -> None:
    """Adds batched timesteps; ended episodes go to `finished`.

    Args:
      ids: i32 [K].
      timestep: batched, [K].
    """
    self._return[ids] += timestep.reward
    self._length[ids] += 1
    edge = timestep.step_type != int(dm_env.StepType.MID)
    if not edge.any():
      return
    first = ids[timestep.step_type == _FIRST]
    self._return[first] = 0.0
    self._length[first] = 0
    for i in ids[timestep.step_type == _LAST]:
      self.finished.append(
        (int(i), float(self._return[i]), int(self._length[i]))
      )

  def take(self) -> list[tuple[int, float, int]]:
    """(environment id, return, length) of episodes ended since last asked."""
    finished, self.finished = self.finished, []
    return finished


class ActorLoop:
  """Steps a vector environment and hands every transition to an adder."""

  def __init__(
    self,
    *,
    environment: core.VectorEnvironment,
    policy: policy_lib.BatchedPolicy,
    adder: core.VectorAdder,
    variables: core.VariableSource,
    variable_update_period_s: float,
  ):
    """Call `wait_for_variables` before `step`."""
    self._environment = environment
    self._policy = policy
    self._adder = adder
    self._variables = variables
    self._period_s = variable_update_period_s
    self._next_update_s = 0.0
    num = environment.num_environments
    self._action: types.Nest = None
    self._log_prob = np.zeros(num, np.float32)
    self._version = np.zeros(num, np.int32)
    self.statistics = EpisodeStatistics(num)
    self.account = timing.TimeAccount('environment', 'act', 'adder')
    self.actor_steps = 0

  def wait_for_variables(self, timeout_s: float) -> bool:
    """Waits for the first variables; returns False at the deadline."""
    first = self._variables.get_variables(1, timeout_s)
    if first is not None:
      self._policy.set_variables(first)
    return first is not None

  @property
  def policy_version(self) -> int:
    """Version of the variables in use; 0 before the first."""
    return self._policy.policy_version

  def step(self, timeout_s: float) -> bool:
    """Serves the environments that are ready.

    Args:
      timeout_s: longest wait for one to be ready, seconds.

    Returns:
      False when none was ready in time.
    """
    with self.account.measure('environment'):
      ready = self._environment.recv(timeout_s)
    if ready is None:
      return False
    ids, timestep = ready
    self._update_variables()
    first = timestep.step_type == _FIRST
    with self.account.measure('act'):
      core_state = self._policy.core_state_before(ids, first)
      output = self._policy.act(ids, timestep.observation, first)
    with self.account.measure('adder'):
      self._record(ids, timestep, core_state, output)
      self.statistics.observe(ids, timestep)
    with self.account.measure('environment'):
      self._environment.send(output.action, ids)
    self.actor_steps += ids.size
    return True

  def run(self, keep_going: Callable[[], bool]) -> None:
    """Steps until `keep_going` returns False; then sends what is finished."""
    while keep_going():
      self.step(timeout_s=0.5)
    self._adder.flush()

  def _update_variables(self) -> None:
    now_s = time.monotonic()
    if now_s < self._next_update_s:
      return
    self._next_update_s = now_s + self._period_s
    newer = self._variables.get_variables(self._policy.policy_version + 1)
    if newer is not None:
      self._policy.set_variables(newer)

  def _record(
    self,
    ids: np.ndarray,
    timestep: dm_env.TimeStep,
    core_state: types.Nest,
    output: types.PolicyOutput,
  ) -> None:
    """Adds `timestep` with the action that led to it; keeps the next one."""
    if self._action is None:
      self._action = np.zeros(
        (self._version.size, *output.action.shape[1:]), output.action.dtype
      )
    self._adder.add(
      ids,
      action=self._action[ids],
      behaviour_log_prob=self._log_prob[ids],
      policy_version=self._version[ids],
      timestep=timestep,
      core_state=core_state,
    )
    self._action[ids] = output.action
    self._log_prob[ids] = output.log_prob
    self._version[ids] = self._policy.policy_version
