"""What happened in one episode of turns, for scores, logs and metrics."""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
from typing import Any


@dataclasses.dataclass
class ToolCall:
  """One call of a tool.

  Attributes:
    name: of the tool, as the policy wrote it.
    arguments: as the policy wrote them.
    result: what it answered, before it is shortened to fit an observation.
    error: its kind (see `taxonomy`); None if there was none.
    started_at_s: wall-clock seconds.
    duration_s: all attempts and the waiting between them.
    num_attempts: 0 if the tool was not reached.
  """

  name: str
  arguments: Any
  result: str = ''
  error: str | None = None
  started_at_s: float = 0.0
  duration_s: float = 0.0
  num_attempts: int = 0


@dataclasses.dataclass
class Turn:
  """One turn of the policy and what it led to.

  Attributes:
    tokens: the policy's own, stop token included.
    text: what they say.
    content: the text without calls.
    calls: that it made.
    errors: of calls that could not be read.
    reward: of the turn; of the last one, with the score.
    observation: tokens that answered it.
  """

  tokens: list[int]
  text: str
  content: str
  calls: list[ToolCall] = dataclasses.field(default_factory=list)
  errors: list[str] = dataclasses.field(default_factory=list)
  reward: float = 0.0
  observation: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Transcript:
  """One episode.

  Attributes:
    seed: of the task.
    episode: its number; with the seed it determines the instance.
    messages: of the conversation so far.
    prompt: its first tokens.
    turns: of the policy.
    score: of a terminated episode; 1 is success. It is part of the last
      turn's reward.
    outcome: 'running', 'terminated', 'truncated' or 'failed'.
    cause: of a truncation ('max_turns', 'max_tokens' or
      'max_observation_tokens') or of a failure (what was raised).
  """

  seed: int
  episode: int
  messages: list[Mapping[str, Any]]
  prompt: list[int]
  turns: list[Turn] = dataclasses.field(default_factory=list)
  score: float | None = None
  outcome: str = 'running'
  cause: str | None = None

  @property
  def answer(self) -> str:
    """What the policy's last turn says, calls left out; '' before the first."""
    return self.turns[-1].content if self.turns else ''

  @property
  def calls(self) -> list[ToolCall]:
    """Of all turns, in order."""
    return [call for turn in self.turns for call in turn.calls]

  @property
  def total_reward(self) -> float:
    """The return so far."""
    return sum(turn.reward for turn in self.turns)

  @property
  def num_tokens(self) -> int:
    """Read and written so far."""
    return len(self.prompt) + sum(
      len(turn.tokens) + len(turn.observation) for turn in self.turns
    )

  def errors(self) -> collections.Counter[str]:
    """How often what went wrong, by kind (see `taxonomy`)."""
    counts = collections.Counter(c.error for c in self.calls if c.error)
    counts['parser'] += sum(len(turn.errors) for turn in self.turns)
    counts['environment'] += self.outcome == 'failed'
    return +counts

  def to_json(self) -> dict[str, Any]:
    """A value that `json.dumps` takes."""
    return {
      **dataclasses.asdict(self),
      'total_reward': self.total_reward,
      'errors': dict(self.errors()),
    }
