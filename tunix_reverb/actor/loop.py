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

_FIRST = np.int32(dm_env.StepType.FIRST)
_MID = np.int32(dm_env.StepType.MID)
_LAST = np.int32(dm_env.StepType.LAST)


# What each environment's last action was: (action [N, ...], log-probability f32
# [N], policy version i32 [N]).
_Choice = tuple[np.ndarray, np.ndarray, np.ndarray]


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
      ids: i32 [K], ascending.
      timestep: batched, [K].
    """
    if ids.size == self._return.size:
      self._return += timestep.reward
      self._length += 1
    else:
      self._return[ids] += timestep.reward
      self._length[ids] += 1
    if np.count_nonzero(timestep.step_type == _MID) == ids.size:
      return
    first = ids[timestep.step_type == _FIRST]
    self._return[first] = 0.0
    self._length[first] = 0
    for i in ids[timestep.step_type == _LAST].tolist():
      self.finished.append((i, float(self._return[i]), int(self._length[i])))

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
    self._choice: _Choice | None = None
    self._versions = np.zeros(0, np.int32)
    self.statistics = EpisodeStatistics(environment.num_environments)
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

  @property
  def num_parked(self) -> int:
    """How many environments wait to be admitted; see `admission`."""
    return 0

  @property
  def is_parked(self) -> bool:
    """Whether all of them do."""
    return self.num_parked == self._environment.num_environments

  @property
  def is_waiting(self) -> bool:
    """Whether it waits for others, who may take as long as they like."""
    return self.is_parked

  @property
  def progress(self) -> int:
    """Grows as long as the loop gets on."""
    return self.actor_steps

  def metrics(self) -> dict[str, float]:
    """What only loops of this kind report."""
    return {}

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
      output = self._choose(ids, timestep, first)
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

  def close(self) -> None:
    """Ends what it waits for besides environments; idempotent."""

  def _update_variables(self) -> None:
    now_s = time.monotonic()
    if now_s < self._next_update_s:
      return
    self._next_update_s = now_s + self._period_s
    newer = self._variables.get_variables(self._policy.policy_version + 1)
    if newer is not None:
      self._policy.set_variables(newer)

  def _choose(
    self, ids: np.ndarray, timestep: dm_env.TimeStep, first: np.ndarray
  ) -> types.PolicyOutput:
    """Asks the policy, unless every episode has ended: nobody acts then."""
    if (
      self._choice is not None
      and ids.size == self._environment.num_environments
      and np.count_nonzero(timestep.step_type == _LAST) == ids.size
    ):
      action, log_prob, _ = self._choice
      return types.PolicyOutput(action, log_prob, core_state=())
    return self._policy.act(ids, timestep.observation, first)

  def _record(
    self,
    ids: np.ndarray,
    timestep: dm_env.TimeStep,
    core_state: types.Nest,
    output: types.PolicyOutput,
  ) -> None:
    """Adds `timestep` with the choice that led to it; keeps the next one."""
    choice = (
      output.action,
      output.log_prob,
      self._version_of(ids.size, self._policy.policy_version),
    )
    if ids.size == self._environment.num_environments:
      before, self._choice = self._choice or choice, choice
    else:
      before = self._exchange(ids, choice)
    action, log_prob, version = before
    self._adder.add(
      ids,
      action=action,
      behaviour_log_prob=log_prob,
      policy_version=version,
      timestep=timestep,
      core_state=core_state,
    )

  def _exchange(self, ids: np.ndarray, choice: _Choice) -> _Choice:
    """Keeps the choice of some environments; returns the one before."""
    num = self._environment.num_environments
    kept = self._choice or [
      np.zeros((num, *a.shape[1:]), a.dtype) for a in choice
    ]
    # What the policy returned whole is read-only.
    kept = tuple(a if a.flags.writeable else np.array(a) for a in kept)
    before = tuple(a[ids] for a in kept)
    for to, values in zip(kept, choice):
      to[ids] = values
    self._choice = kept
    return before

  def _version_of(self, count: int, version: int) -> np.ndarray:
    """i32 [K] of `version`; made once per version while all answer."""
    if self._versions.size != count or self._versions[0] != version:
      self._versions = np.full(count, version, np.int32)
      self._versions.flags.writeable = False
    return self._versions
