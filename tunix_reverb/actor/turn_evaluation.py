"""Plays evaluation episodes of turns, and keeps what was said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.actor import engine as engine_lib
from tunix_reverb.actor import evaluation
from tunix_reverb.actor import permit_line
from tunix_reverb.actor import turn_loop


class Transcripts:
  """Gathers the transcripts of environments that step in several threads."""

  def __init__(self) -> None:
    self._ended: list[Any] = []

  def add(self, environment_id: int, transcript: Any) -> None:
    """Takes an episode that is over; of one that failed nothing is kept."""
    del environment_id
    if transcript.outcome != 'failed':
      self._ended.append(transcript)

  def take(self) -> list[Any]:
    """Those added since the last call."""
    ended, self._ended = self._ended, []
    return ended


class TurnEvaluator(evaluation.Evaluator):
  """Plays exactly as many episodes as are asked for, each to its end.

  So no version's evaluation holds an episode of another, and short episodes are
  not favoured. Every evaluation plays tasks that none has played before.
  """

  def __init__(
    self,
    environment: core.VectorEnvironment,
    engine: engine_lib.Engine,
    transcripts: Transcripts,
    *,
    num_episodes: int,
    config: turn_loop.TurnConfig,
  ):
    """Call `set_variables` before `evaluate`.

    Args:
      environment: N turn environments, whose tasks nobody trains on.
      engine: of N slots.
      transcripts: of the environments; may stay empty.
      num_episodes: of one evaluation.
      config: how they are played.
    """
    self._environment = environment
    self._engine = engine
    self._transcripts = transcripts
    self._num_episodes = num_episodes
    self._permits = permit_line.OwnPermits(limit=0)
    self._ended = _Ended()
    self._loop = turn_loop.TurnLoop(
      environment=environment,
      engine=engine,
      adder=self._ended,
      variables=_Pinned(),
      variable_update_period_s=np.inf,
      permits=self._permits,
      config=config,
    )

  @property
  def policy_version(self) -> int:
    """See base class."""
    return self._engine.policy_version

  def set_variables(self, variables: types.Variables) -> None:
    """See base class."""
    self._engine.set_variables(variables)

  def evaluate(
    self,
    *,
    keep_going: Callable[[], bool] = lambda: True,
    on_progress: Callable[[], None] = lambda: None,
  ) -> evaluation.EvaluationResult | None:
    """See base class."""
    self._permits.allow(self._num_episodes)
    steps = self._loop.actor_steps
    while len(self._ended.returns) < self._num_episodes:
      if not keep_going():
        return None
      self._loop.step(0.5)
      if self._loop.actor_steps > steps:
        steps = self._loop.actor_steps
        on_progress()
    returns, lengths = self._ended.take()
    transcripts = self._transcripts.take()
    return evaluation.EvaluationResult(
      returns=returns,
      lengths=lengths,
      policy_version=self.policy_version,
      successes=sum(t.score == 1 for t in transcripts) if transcripts else None,
      transcripts=[transcript.to_json() for transcript in transcripts],
    )

  def close(self) -> None:
    """See base class."""
    self._environment.close()
    self._loop.close()


class _Pinned(core.VariableSource):
  """Never anything newer."""

  def get_variables(
    self, min_version: int = 0, timeout_s: float = 0.0
  ) -> types.Variables | None:
    return None


class _Ended:
  """Stands in for an adder: returns and lengths of what has ended."""

  def __init__(self) -> None:
    self.returns: list[float] = []
    self._lengths: list[int] = []

  def add(self, trajectories: types.Trajectories) -> None:
    self.returns.append(float(trajectories.reward.sum()))
    # Turns of the policy: every other run of tokens.
    self._lengths.append((int(trajectories.turn_id.max()) + 1) // 2)

  def send_due(self) -> None:
    pass

  def flush(self) -> None:
    pass

  def take(self) -> tuple[np.ndarray, np.ndarray]:
    returns = np.array(self.returns)
    lengths = np.array(self._lengths, np.int64)
    self.returns, self._lengths = [], []
    return returns, lengths
