"""Plays evaluation episodes with the most likely actions."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import dm_env
import numpy as np

from tunix_reverb import core
from tunix_reverb.actor import loop
from tunix_reverb.actor import policy as policy_lib

_FIRST = int(dm_env.StepType.FIRST)


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
  """Returns and lengths of whole episodes.

  Attributes:
    returns: f64 [episodes], undiscounted.
    lengths: i64 [episodes], actor steps.
    policy_version: of the variables that played them.
  """

  returns: np.ndarray
  lengths: np.ndarray
  policy_version: int

  def metrics(self) -> dict[str, float]:
    """The evaluator's metrics."""
    return {
      'evaluation_return_mean': float(self.returns.mean()),
      'evaluation_return_std': float(self.returns.std()),
      'evaluation_return_min': float(self.returns.min()),
      'evaluation_return_max': float(self.returns.max()),
      'evaluation_length_mean': float(self.lengths.mean()),
      'evaluation_episodes': float(self.returns.size),
      'policy_version': float(self.policy_version),
    }


def environments_for(num_episodes: int, limit: int = 32) -> int:
  """The most environments <= `limit` that share the episodes evenly."""
  return max(n for n in range(1, limit + 1) if num_episodes % n == 0)


def evaluate(
  environment: core.VectorEnvironment,
  policy: policy_lib.BatchedPolicy,
  *,
  num_episodes: int,
  keep_going: Callable[[], bool] = lambda: True,
  on_progress: Callable[[], None] = lambda: None,
) -> EvaluationResult | None:
  """Plays `num_episodes`, the same number in each environment.

  Counting the first episodes to end over all environments would favour short
  ones; here each environment plays its own share to the end. Episodes that
  were under way when the call began do not count.

  Args:
    environment: N environments; N divides `num_episodes`.
    policy: greedy, with variables.
    num_episodes: in total.
    keep_going: asked after every step; False gives up.
    on_progress: called after every step.

  Returns:
    None if given up.
  """
  num = environment.num_environments
  share, rest = divmod(num_episodes, num)
  if rest:
    raise ValueError(
      f'num_episodes ({num_episodes}) must be a multiple of the environments '
      f'({num})'
    )
  statistics = loop.EpisodeStatistics(num)
  started = np.zeros(num, np.bool_)
  played: list[list[tuple[float, int]]] = [[] for _ in range(num)]
  while any(len(episodes) < share for episodes in played):
    if not keep_going():
      return None
    ready = environment.recv(0.5)
    if ready is None:
      continue
    ids, timestep = ready
    first = timestep.step_type == _FIRST
    started[ids[first]] = True
    statistics.observe(ids, timestep)
    for i, episode_return, length in statistics.take():
      if started[i] and len(played[i]) < share:
        played[i].append((episode_return, length))
    output = policy.act(ids, timestep.observation, first)
    environment.send(output.action, ids)
    on_progress()
  episodes = np.array([e for slot in played for e in slot])
  return EvaluationResult(
    returns=episodes[:, 0],
    lengths=episodes[:, 1].astype(np.int64),
    policy_version=policy.policy_version,
  )
