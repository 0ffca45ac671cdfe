"""Records one episode of turns as a trajectory of tokens.

The trajectory holds all tokens in order, those that the policy read as well as
those it wrote. Its transition t writes token t + 1. Nothing is encoded again:
the tokens that were sampled are the tokens that are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunix_reverb import types
from tunix_reverb.actor import engine as engine_lib


class Recorder:
  """One episode from its prompt to its end."""

  def __init__(
    self,
    *,
    token_dtype: np.dtype,
    actor_id: int,
    episode_id: int,
    created_at_s: float,
  ):
    """Args: token_dtype: in which tokens are stored; actor_id, episode_id and
    created_at_s: see `types.Trajectories`."""
    self._token_dtype = token_dtype
    self._actor_id = actor_id
    self._episode_id = episode_id
    self._created_at_s = created_at_s
    # Parts of [all tokens], to be joined at the end.
    self._tokens: list[np.ndarray] = []
    self._is_written: list[np.ndarray] = []
    self._log_probs: list[np.ndarray] = []
    self._versions: list[np.ndarray] = []
    self._turn_ids: list[np.ndarray] = []
    # (index of a turn's last token, its reward)
    self._rewards: list[tuple[int, float]] = []
    self.num_tokens = 0
    self.total_reward = 0.0

  def read(self, tokens: Sequence[int], policy_version: int) -> None:
    """The policy is to read `tokens`, the prompt first, before its next turn.

    Args:
      tokens: may be empty after the prompt.
      policy_version: of the variables that begin to read them.
    """
    size = len(tokens)
    self._add(
      np.asarray(tokens, np.int32),
      np.zeros(size, np.bool_),
      np.zeros(size, np.float32),
      np.full(size, policy_version, np.int32),
    )

  def write(self, turn: engine_lib.Turn) -> None:
    """The policy has written `turn`."""
    size = turn.tokens.size
    self._add(
      turn.tokens, np.ones(size, np.bool_), turn.log_probs, turn.policy_versions
    )

  def reward(self, reward: float) -> None:
    """The environment has answered the turn that was written last."""
    self._rewards.append((self.num_tokens - 1, reward))
    self.total_reward += reward

  def finish(self, discount: float) -> types.Trajectories:
    """The whole trajectory, without a permit.

    Args:
      discount: of the last timestep: 0 at a termination.
    """
    tokens = np.concatenate(self._tokens).astype(self._token_dtype)
    # Column t is of what writes token t + 1.
    column = lambda parts: np.concatenate(parts)[1:]
    rewards = np.zeros(self.num_tokens, np.float32)
    for index, reward in self._rewards:
      rewards[index] += reward
    discounts = np.ones(self.num_tokens - 1, np.float32)
    discounts[-1] = discount
    one = lambda value, dtype: np.array([value], dtype)
    return types.Trajectories(
      observation=tokens,
      action=tokens[1:],
      reward=rewards[1:],
      discount=discounts,
      behaviour_log_prob=column(self._log_probs),
      policy_version=column(self._versions),
      loss_mask=column(self._is_written),
      core_state=(),
      lengths=one(self.num_tokens - 1, np.int32),
      created_at_s=one(self._created_at_s, np.float64),
      actor_id=one(self._actor_id, np.int32),
      episode_id=one(self._episode_id, np.int64),
      truncated=one(discount > 0, np.bool_),
      permit_id=one(0, np.int64),
      turn_id=column(self._turn_ids),
    )

  def _add(
    self,
    tokens: np.ndarray,
    is_written: np.ndarray,
    log_probs: np.ndarray,
    versions: np.ndarray,
  ) -> None:
    # The prompt is turn 0, the policy's turns 1, 3, ..., what answers them 2,
    # 4, ...
    turn_id = len(self._tokens)
    self._tokens.append(tokens)
    self._is_written.append(is_written)
    self._log_probs.append(log_probs)
    self._versions.append(versions)
    self._turn_ids.append(np.full(tokens.size, turn_id, np.int32))
    self.num_tokens += tokens.size
