"""What a user writes to add a task: one function, or one class.

  def doubling(generator):
    number = int(generator.integers(100))
    return task.Instance(
      messages=[{'role': 'user', 'content': f'2 * {number} = ?'}],
      score=lambda episode: float(episode.answer == str(2 * number)),
      oracle=lambda episode: str(2 * number),
    )

`tool:my_module:doubling` is its environment. A class (`Task`) has limits of
its own as well, and can hold what all its episodes share.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import numpy as np

from tunix_reverb import errors
from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import tool as tool_lib
from tunix_reverb.environments.tools import transcript
from tunix_reverb.text import tokeniser

Transcript = transcript.Transcript


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Of one episode.

  Attributes:
    max_turns: of the policy; with that many the episode is truncated.
    max_turn_tokens: of one turn of the policy, stop token included.
    max_observation_tokens: of a prompt, or of what answers a turn. Longer
      results of tools are shortened; longer prompts are passed over.
    max_tokens: of an episode. It is truncated when another whole turn would
      not fit.
    calls_s: seconds of one turn after which no further call of it begins. With
      the longest call it must stay below what an environment may take.
  """

  max_turns: int = 8
  max_turn_tokens: int = 256
  max_observation_tokens: int = 1024
  max_tokens: int = 4096
  calls_s: float = 20.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      least = 0 if field.name == 'calls_s' else 1
      if not value >= least:
        raise errors.UserError(f'{field.name} ({value}) must be >= {least}')
    if self.max_tokens <= self.max_turn_tokens:
      raise errors.UserError(
        f'max_tokens ({self.max_tokens}) must be > max_turn_tokens '
        f'({self.max_turn_tokens}): a prompt and a turn must fit'
      )


def until_answer(episode: Transcript) -> Sequence[tokeniser.Message] | None:
  """Goes on while the policy calls tools, or tries to; ends otherwise."""
  turn = episode.turns[-1]
  return () if turn.calls or turn.errors else None


def no_reward(episode: Transcript) -> float:
  """No reward for a turn."""
  del episode
  return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
  """One problem to solve. The functions see the episode so far.

  Attributes:
    messages: what the policy reads first.
    score: the reward at the end, of a terminated episode.
    tools: that the policy may call.
    turn_reward: the reward of the last turn.
    next_messages: what is said after the last turn, besides the results of
      tools, which have been added already; None ends the episode.
    oracle: the next turn of a perfect policy: a call, or text.
  """

  messages: Sequence[tokeniser.Message]
  score: Callable[[Transcript], float]
  tools: Sequence[tool_lib.Tool] = ()
  turn_reward: Callable[[Transcript], float] = no_reward
  next_messages: Callable[[Transcript], Sequence[tokeniser.Message] | None] = (
    until_answer
  )
  oracle: Callable[[Transcript], calls.Call | str] | None = None


class Task(abc.ABC):
  """A source of instances.

  Attributes:
    limits: of its episodes, for models with a chat template.
    character_limits: for models from scratch, which read characters; None if
      the task cannot be told in the sixteen tokens there are.
  """

  limits: Limits = Limits()
  character_limits: Limits | None = None

  @abc.abstractmethod
  def start(self, generator: np.random.Generator) -> Instance:
    """An instance, a pure function of `generator`."""

  def close(self) -> None:
    """Ends what the task started."""
    return


class FunctionTask(Task):
  """A task that is no more than its `start`."""

  def __init__(self, start: Callable[[np.random.Generator], Instance]):
    """Args: start: as of `Task`."""
    self._start = start

  def start(self, generator: np.random.Generator) -> Instance:
    return self._start(generator)
