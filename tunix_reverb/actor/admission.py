"""The actor's loop with admission: no trajectory without a permit.

An environment whose trajectory starts, at the beginning of an episode or where
a long one was cut, is parked: its timestep is kept and no action is sent, until
a permit has come and the variables are as new as the permit asks. The others go
on. A permit stays with its environment until a trajectory has ended, so one
that was lost leaves it to the next.
"""

from __future__ import annotations

from typing import Protocol

import dm_env
import numpy as np
import tree

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.actor import loop as loop_lib
from tunix_reverb.actor import permit_line
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

  See `permit_line.PermitLine` for who gets which permit.
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
      in_turn: permits go by number, see `PermitLine`.
    """
    super().__init__(
      environment=environment,
      policy=policy,
      adder=adder,
      variables=variables,
      variable_update_period_s=variable_update_period_s,
    )
    self._num = environment.num_environments
    self._line = permit_line.PermitLine(permits, self._num, in_turn=in_turn)
    # The latest timestep of each environment: [N, ...].
    self._observation: types.Nest = None
    self._is_first = np.zeros(self._num, np.bool_)

  @property
  def num_parked(self) -> int:
    """How many environments wait for a permit or for its variables."""
    return self._line.num_parked

  def close(self) -> None:
    """Gives back the permits whose trajectories have not ended; idempotent."""
    self._line.close(self._adder.held_permits())

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
    line, version = self._line, self._policy.policy_version
    line.fetch(timeout_s if self.is_parked else 0.0)
    if not self.is_parked:
      if line.can_release(version):
        timeout_s = 0.0
      elif line.is_waiting:
        timeout_s = min(timeout_s, _POLL_S)
      return self._environment.recv(timeout_s)
    if line.wanted_version > version:
      newer = self._variables.get_variables(line.wanted_version, timeout_s)
      if newer is not None:
        self._policy.set_variables(newer)
    return None

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
      self._line.park(ids[lacks].tolist())
    return ids[~lacks]

  def _release(self) -> np.ndarray:
    """Gives out the permits that may be used: who may go on, i32 [K]."""
    ids, permit_ids = self._line.release(self._policy.policy_version)
    released = np.array(ids, np.int32)
    if ids:
      self._adder.admit(released, np.array(permit_ids, np.int64))
    return released
