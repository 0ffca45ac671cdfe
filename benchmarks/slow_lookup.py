"""A look-up whose tool takes its time and whose texts are long, as in logs.

  889+-9(log)473. -> ! -> =98+5-5(log)85. -> 5.

`tool:lookup` shaped like the work of real agents: the key comes after a log of
noise, what the tool says is a log in which the answer comes up again and again,
and before it says so it waits, log-normally, as long as a client would at most.
What the policy reads outnumbers what it writes fiftyfold. The first call earns
0.2, a second one loses it, the answer earns 1. The wait is a sleep: it costs
nobody's core.

`tool:benchmarks.slow_lookup:SlowLookup`; `SwiftLookup` is the same without the
waits, so that scores can be compared without them.
"""

from __future__ import annotations

import time

import numpy as np

from tunix_reverb.environments.tasks import symbols
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool

# Of a call: log-normal, cut where a client would give up, seconds.
MEAN_S = 1.5
SIGMA = 1.0
LONGEST_S = 10.0
# Of the texts, tokens: uniform between the two.
LEAST_NOISE, MOST_NOISE = 88, 100
CALL_BONUS = 0.2

_NOISE = list('89+-')
_KEY_SYMBOLS = 3
_TURN_TOKENS = 2
_TEXT_TOKENS = MOST_NOISE + _KEY_SYMBOLS + 2
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
    asked = symbols.draw_symbols(generator, _KEY_SYMBOLS)
    answer = symbols.draw_symbols(generator, 1)
    prompt = _log(generator, _NOISE) + asked
    result = _log(generator, [*_NOISE, answer])

    @tool.tool(timeout_s=None)
    def lookup(key: str = '') -> str:
      """Looks a key up.

      Args:
        key: the user's; the same if left out.
      """
      self.wait()
      if key not in ('', asked):
        raise taxonomy.ToolError(f'the user did not ask for {key}')
      return result

    return task.Instance(
      messages=[{'role': 'user', 'content': prompt}],
      tools=[lookup],
      score=lambda episode: _score(episode, answer),
      turn_reward=_turn_reward,
      next_messages=_next_messages,
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


def _next_messages(episode: task.Transcript):
  return None if len(episode.turns) == 2 else task.until_answer(episode)


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
