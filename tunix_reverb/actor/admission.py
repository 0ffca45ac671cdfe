"""The actor's loop with admission: no trajectory without a permit.

An environment whose trajectory starts, at the beginning of an episode or where
a long one was cut, is parked: its timestep is kept and no action is sent, until
a permit has come and the variables are as new as the permit asks. The others go
on. A permit stays with its environment until a trajectory has ended, so one
that was lost leaves it to the next.
"""

from __future__ import annotations

import collections
from typing import Protocol

import dm_env
import numpy as np
import tree

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.actor import loop as loop_lib
from tunix_reverb.actor import policy as policy_lib

_FIRST = np.int32(dm_env.StepType.FIRST)

# Between two looks for permits while other environments are at work, seconds.
_POLL_S = 0.02


class AdmittingAdder(Protocol):
  """What this needs of an adder besides `core.VectorAdder`."""

  def add(self, environment_ids: np.ndarray, **kwargs) -> None:
    """See `core.VectorAdder`."""

  def flush(self) -> None:
    """See `core.VectorAdder`."""

  def lacks_permit(self, environment_ids: np.ndarray) -> np.ndarray:
    """Where a trajectory waits for a permit, bool [K]."""

  def admit(self, environment_ids: np.ndarray, permit_id: np.ndarray) -> None:
    """Gives permits, i64 [K]."""

  def held_permits(self) -> list[int]:
    """Permits given whose trajectories have not ended."""


class AdmittedLoop(loop_lib.ActorLoop):
  """Steps a vector environment, each trajectory under a permit.

  It asks for exactly as many permits as environments are parked. Whoever was
  parked first gets the first permit. With `in_turn`, environments get permits
  by number, over and over, however long each takes: what is generated then does
  not depend on their speed, but the slowest holds up the others.
  """

  def __init__(
    self,
    *,
    environment: core.VectorEnvironment,
    policy: policy_lib.BatchedPolicy,
    adder: AdmittingAdder,
    variables: core.VariableSource,
    variable_update_period_s: float,
    permits: core.PermitSource,
    in_turn: bool,
  ):
    """Call `wait_for_variables` before `step`.

    Args:
      environment: N environments.
      policy: with `independent` environments, for `in_turn` to have its effect.
      adder: takes the transitions.
      variables: where newer variables come from.
      variable_update_period_s: how often they are asked for.
      permits: where permits come from.
      in_turn: see the class.
    """
    super().__init__(
      environment=environment,
      policy=policy,
      adder=adder,
      variables=variables,
      variable_update_period_s=variable_update_period_s,
    )
    self._permits = permits
    self._in_turn = in_turn
    self._num = environment.num_environments
    self._all = np.arange(self._num, dtype=np.int32)
    self._parked = np.zeros(self._num, np.bool_)
    self._next_turn = 0
    # Those that a permit was requested for, and the permits that have come.
    self._line: collections.deque[int] = collections.deque()
    self._granted: collections.deque[types.Permit] = collections.deque()
    # The latest timestep of each environment: [N, ...].
    self._observation: types.Nest = None
    self._is_first = np.zeros(self._num, np.bool_)

  @property
  def num_parked(self) -> int:
    """How many environments wait for a permit or for its variables."""
    return int(np.count_nonzero(self._parked))

  def close(self) -> None:
    """Gives back the permits whose trajectories have not ended; idempotent."""
    unused = [permit.permit_id for permit in self._granted]
    self._permits.close(unused + self._adder.held_permits())

  def step(self, timeout_s: float) -> bool:
    """Serves the environments that are ready and admitted.

    Args:
      timeout_s: longest wait for one to be ready, seconds.

    Returns:
      False when none was ready in time.
    """
    with self.account.measure('environment'):
      ready = self._receive(timeout_s)
    self._update_variables()
    go = np.zeros(0, np.int32)
    if ready is not None:
      with self.account.measure('adder'):
        go = self._keep(*ready)
    go = np.sort(np.concatenate([go, self._release()]))
    if not go.size:
      return ready is not None
    with self.account.measure('act'):
      rows = lambda values: values[go]
      output = self._policy.act(
        go, tree.map_structure(rows, self._observation), self._is_first[go]
      )
      version = np.full(go.size, self._policy.policy_version, np.int32)
      self._exchange(go, (output.action, output.log_prob, version))
    with self.account.measure('environment'):
      self._environment.send(output.action, go)
    self.actor_steps += go.size
    return True

  def _receive(
    self, timeout_s: float
  ) -> tuple[np.ndarray, dm_env.TimeStep] | None:
    """Waits for an environment, or for what the parked ones wait for."""
    self._granted += self._permits.take(0.0)
    if not self.is_parked:
      if self._can_release():
        timeout_s = 0.0
      elif self._line:
        timeout_s = min(timeout_s, _POLL_S)
      return self._environment.recv(timeout_s)
    if not self._granted:
      self._granted += self._permits.take(timeout_s)
    if self._granted and not self._can_release():
      newer = self._variables.get_variables(
        self._granted[0].policy_version, timeout_s
      )
      if newer is not None:
        self._policy.set_variables(newer)
    return None

  def _can_release(self) -> bool:
    version = self._policy.policy_version
    return bool(self._granted) and self._granted[0].policy_version <= version

  def _keep(self, ids: np.ndarray, timestep: dm_env.TimeStep) -> np.ndarray:
    """Records and keeps what came; returns who may go on at once, i32 [K]."""
    if self._observation is None:
      room = lambda a: np.zeros((self._num, *a.shape[1:]), a.dtype)
      self._observation = tree.map_structure(room, timestep.observation)
    tree.map_structure(
      lambda kept, new: kept.__setitem__(ids, new),
      self._observation,
      timestep.observation,
    )
    is_first = self._is_first[ids] = timestep.step_type == _FIRST
    # Before any choice all is FIRST, which ignores it.
    action, log_prob, version = self._choice or 3 * (np.zeros((), np.int32),)
    take = lambda values: values[ids] if values.ndim else values
    self._adder.add(
      ids,
      action=take(action),
      behaviour_log_prob=take(log_prob),
      policy_version=take(version),
      timestep=timestep,
      core_state=self._policy.core_state_before(ids, is_first),
    )
    self.statistics.observe(ids, timestep)
    lacks = self._adder.lacks_permit(ids)
    if lacks.any():
      self._park(ids[lacks])
    return ids[~lacks]

  def _park(self, ids: np.ndarray) -> None:
    """Parks `ids` and requests permits for those whose turn it is."""
    self._parked[ids] = True
    due = ids.tolist()
    if self._in_turn:
      due = []
      while len(self._line) + len(due) < self._num:
        if not self._parked[self._next_turn]:
          break
        due.append(self._next_turn)
        self._next_turn = (self._next_turn + 1) % self._num
    self._line += due
    if due:
      self._permits.request(len(due))

  def _release(self) -> np.ndarray:
    """Gives out the permits that may be used: who may go on, i32 [K]."""
    ids, permit_ids = [], []
    while self._line and self._can_release():
      ids.append(self._line.popleft())
      permit_ids.append(self._granted.popleft().permit_id)
    released = np.array(ids, np.int32)
    if ids:
      self._parked[released] = False
      self._adder.admit(released, np.array(permit_ids, np.int64))
    return released
