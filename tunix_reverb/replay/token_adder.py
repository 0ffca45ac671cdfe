"""The adder of token trajectories.

The environment's observation at each timestep is a dict of three scalars:
`token`; `loss_mask`, whether the policy chooses the next token; and `turn_id`,
the turn of the next token. Stored are the tokens alone, as observations and,
one later, as actions: where the environment forced the next token, the action
is that token and not what the policy would have said. Letter: K environments
stepping together.
"""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import adder

_MID = np.int32(dm_env.StepType.MID)


class TokenAdder(adder.TrajectoryAdder):
  """Builds token trajectories of N environments and groups them into items.

  An episode is one trajectory: its second part would lack what the policy had
  seen of the first.
  """

  def __init__(
    self, *, num_environments: int, trajectory_length: int, **kwargs: Any
  ):
    """See base class; `trajectory_length` must hold the longest episode."""
    super().__init__(
      num_environments=num_environments,
      trajectory_length=trajectory_length,
      **kwargs,
    )
    self._trajectory_length = trajectory_length
    # Of the next token of each environment.
    self._loss_mask = np.zeros(num_environments, np.bool_)
    self._turn_id = np.zeros(num_environments, np.int32)

  def add(
    self,
    environment_ids: np.ndarray,
    *,
    action: types.Nest,
    behaviour_log_prob: np.ndarray,
    policy_version: np.ndarray,
    timestep: dm_env.TimeStep,
    core_state: types.Nest = (),
  ) -> None:
    """See base class; `action` is not read: the next token says it.

    Raises:
      errors.UserError: an episode is longer than `trajectory_length`.
    """
    observation = timestep.observation
    token, loss_mask = observation['token'], self._loss_mask[environment_ids]
    transitions = (
      token,
      timestep.reward,
      timestep.discount,
      np.where(loss_mask, behaviour_log_prob, np.float32(0.0)),
      policy_version,
      loss_mask,
      self._turn_id[environment_ids],
    )
    self._loss_mask[environment_ids] = observation['loss_mask']
    self._turn_id[environment_ids] = observation['turn_id']
    timestep = timestep._replace(observation=token)
    self._add(environment_ids, transitions, timestep, core_state)

  def _cut(self, environment_ids: np.ndarray, *args: Any) -> None:
    self._refuse(environment_ids)

  def _turn(
    self,
    environment_ids: np.ndarray,
    timestep: dm_env.TimeStep,
    size: np.ndarray,
    full: np.ndarray,
    *args: Any,
  ) -> None:
    if (full & (timestep.step_type == _MID)).any():
      self._refuse(environment_ids)
    super()._turn(environment_ids, timestep, size, full, *args)

  def _refuse(self, environment_ids: np.ndarray) -> None:
    raise errors.UserError(
      f'trajectory_length ({self._trajectory_length}) must hold every episode '
      f'of tokens whole; one of environments {environment_ids.tolist()} is '
      'longer: raise it, and bucket_lengths with it'
    )
