"""Plays evaluation episodes with the most likely actions."""

from __future__ import annotations

import abc
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import dm_env
import numpy as np

from tunix_reverb import core
from tunix_reverb import types
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
    successes: how many of them reached what their task asks for; None where
      tasks do not say.
    transcripts: of episodes of turns, values for JSON; else empty.
  """

  returns: np.ndarray
  lengths: np.ndarray
  policy_version: int
  successes: int | None = None
  transcripts: Sequence[Mapping[str, Any]] = ()

  def metrics(self) -> dict[str, float]:
    """The evaluator's metrics."""
    metrics = {
      'evaluation_return_mean': float(self.returns.mean()),
      'evaluation_return_std': float(self.returns.std()),
      'evaluation_return_min': float(self.returns.min()),
      'evaluation_return_max': float(self.returns.max()),
      'evaluation_length_mean': float(self.lengths.mean()),
      'evaluation_episodes': float(self.returns.size),
      'policy_version': float(self.policy_version),
    }
    if self.successes is not None:
      low, high = wilson_interval(self.successes, self.returns.size)
      metrics |= {
        'evaluation_success_rate': self.successes / self.returns.size,
        'evaluation_success_low': low,
        'evaluation_success_high': high,
      }
    return metrics

  def describe(self) -> str:
    """In one line, or two where tasks say what success is."""
    returns = self.returns
    lines = [
      f'return {returns.mean():.3f} +- {returns.std():.3f} '
      f'(mean +- standard deviation over {returns.size} episodes), '
      f'from {returns.min():.3f} to {returns.max():.3f}; '
      f'length {self.lengths.mean():.1f}'
    ]
    if self.successes is not None:
      low, high = wilson_interval(self.successes, returns.size)
      lines.append(
        f'success {self.successes} of {returns.size} (95% confidence: '
        f'{low:.1%} to {high:.1%})'
      )
    return '\n'.join(lines)


class Evaluator(abc.ABC):
  """Plays a number of episodes with one version of the variables."""

  @property
  @abc.abstractmethod
  def policy_version(self) -> int:
    """Version of the variables; 0 before the first."""

  @abc.abstractmethod
  def set_variables(self, variables: types.Variables) -> None:
    """Plays with `variables` from the next evaluation on."""

  @abc.abstractmethod
  def evaluate(
    self,
    *,
    keep_going: Callable[[], bool] = lambda: True,
    on_progress: Callable[[], None] = lambda: None,
  ) -> EvaluationResult | None:
    """Plays the episodes of one evaluation.

    Args:
      keep_going: asked after every step; False gives up.
      on_progress: called after every step that led on.

    Returns:
      None if given up.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Closes the environments."""


class PolicyEvaluator(Evaluator):
  """Of a batched policy; see `evaluate`."""

  def __init__(
    self,
    environment: core.VectorEnvironment,
    policy: policy_lib.BatchedPolicy,
    *,
    num_episodes: int,
  ):
    """Args: environment, policy, num_episodes: see `evaluate`."""
    self._environment = environment
    self._policy = policy
    self._num_episodes = num_episodes

  @property
  def policy_version(self) -> int:
    """See base class."""
    return self._policy.policy_version

  def set_variables(self, variables: types.Variables) -> None:
    """See base class."""
    self._policy.set_variables(variables)

  def evaluate(self, **kwargs: Any) -> EvaluationResult | None:
    """See base class."""
    return evaluate(
      self._environment, self._policy, num_episodes=self._num_episodes, **kwargs
    )

  def close(self) -> None:
    """See base class."""
    self._environment.close()


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
  """The 95% confidence interval of a rate (Wilson 1927).

  Unlike mean +- 2 standard deviations it stays within 0 to 1, and does not
  shrink to a point where all trials came out alike.
  """
  z2 = 1.959964**2
  rate = successes / trials
  centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
  spread = math.sqrt(
    z2 * (rate * (1 - rate) / trials + z2 / (4 * trials**2))
  ) / (1 + z2 / trials)
  return max(0.0, centre - spread), min(1.0, centre + spread)


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
