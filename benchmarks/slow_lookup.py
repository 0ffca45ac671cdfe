"""A look-up whose tool takes its time and whose texts are long, as in logs.

  889+-9(log). -> ! -> =98+3-33(log)83. -> 3.

`tool:lookup` shaped like the work of real agents: the prompt is a log of noise,
what the tool says is a log in which the answer comes up again and again, and
before it says so it waits, log-normally, as long as a client would at most.
Who does not call it reads a second log of noise instead, so that all episodes
are about as long. What the policy reads outnumbers what it writes about
twentyfold.
The call earns 0.5, more than the guess that it leaves undone; calling once more
loses as much, and the answer earns 1. The wait is a sleep: it costs nobody's
core.

`tool:benchmarks.slow_lookup:SlowLookup`; `SwiftLookup` is the same without the
waits, so that scores can be compared without them.
"""

from __future__ import annotations

from collections.abc import Sequence
import time

import numpy as np

from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import tool
from tunix_reverb.text import tokeniser

# Of a call: log-normal, cut where a client would give up, seconds.
MEAN_S = 2.0
SIGMA = 1.0
LONGEST_S = 8.0
# Of the texts, tokens: uniform between the two.
LEAST_NOISE, MOST_NOISE = 24, 32
CALL_BONUS = 0.5
BEST_RETURN = CALL_BONUS + 1.0

_NOISE = list('89+-')
_ANSWERS = '0123'
_TURN_TOKENS = 2
_TEXT_TOKENS = MOST_NOISE + 2
# A prompt, a call, its answer and the policy's.
MOST_TOKENS = 2 * (_TEXT_TOKENS + _TURN_TOKENS)


class SwiftLookup(task.Task):
  """Without waits; see the module's docstring."""

  character_limits = task.Limits(
    max_turns=2,
    max_turn_tokens=_TURN_TOKENS,
    max_observation_tokens=_TEXT_TOKENS,
    max_tokens=MOST_TOKENS,
  )

  def start(self, generator: np.random.Generator) -> task.Instance:
    answer = str(generator.choice(list(_ANSWERS)))
    prompt, other = _log(generator, _NOISE), _log(generator, _NOISE)
    result = _log(generator, [*_NOISE, *[answer] * len(_NOISE)])

    @tool.tool(timeout_s=None)
    def lookup(text: str = '') -> str:
      """Looks up what the answer is.

      Args:
        text: is not looked at.
      """
      del text
      self.wait()
      return result

    def next_messages(
      episode: task.Transcript,
    ) -> Sequence[tokeniser.Message] | None:
      if len(episode.turns) == 2:
        return None
      called = episode.turns[0].calls
      return () if called else [{'role': 'user', 'content': other}]

    return task.Instance(
      messages=[{'role': 'user', 'content': prompt}],
      tools=[lookup],
      score=lambda episode: _score(episode, answer),
      turn_reward=_turn_reward,
      next_messages=next_messages,
      oracle=lambda episode: (
        answer if episode.turns else calls.Call('lookup', {'text': ''})
      ),
    )

  def wait(self) -> None:
    """What the tool does before it answers."""


class SlowLookup(SwiftLookup):
  """With waits, which differ between the environments of a group."""

  def __init__(self):
    self._generator = np.random.default_rng()

  def wait(self) -> None:
    time.sleep(draw_wait_s(self._generator))


def draw_wait_s(generator: np.random.Generator) -> float:
  """Seconds of one call."""
  # exp(-sigma^2 / 2) makes the mean 1 before the cut.
  factor = generator.lognormal(-(SIGMA**2) / 2, SIGMA)
  return min(MEAN_S * float(factor), LONGEST_S)


def _log(generator: np.random.Generator, characters: list[str]) -> str:
  size = int(generator.integers(LEAST_NOISE, MOST_NOISE + 1))
  return ''.join(generator.choice(characters, size))


def _turn_reward(episode: task.Transcript) -> float:
  if not episode.turns[-1].calls:
    return 0.0
  return CALL_BONUS if len(episode.turns) == 1 else -CALL_BONUS


def _score(episode: task.Transcript, answer: str) -> float:
  """The fraction of the symbols written, or asked for, that are right."""
  if episode.turns[-1].calls:
    return 0.0
  text = episode.answer.strip()
  right = sum(a == b for a, b in zip(text, answer))
  return right / max(len(text), len(answer))
