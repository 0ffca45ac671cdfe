"""Look a key up: nobody can know the answer who did not call the tool.

  47. -> ! -> =3. -> 3.

The answer is drawn anew for every episode and stands nowhere but in the tool.
The first look-up earns `call_bonus`; the answer earns the fraction of its
symbols that are right, of as many as were written or asked for. Without the
call that is 1 / 8 at best. The second turn ends the episode, whatever it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunix_reverb import errors
from tunix_reverb.environments.tasks import symbols
from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool
from tunix_reverb.environments.tools import transcript
from tunix_reverb.text import tokeniser

_MAX_KEY_SYMBOLS = 3
_DEFAULT_CALL_BONUS = 0.1
_INSTRUCTIONS = (
  'The user gives you a key. Look it up with the tool, then answer with what '
  'the tool said and nothing else.'
)


class LookupTask(task.Task):
  """Keys of 1 to 3 symbols; see the module's docstring."""

  def __init__(self, *, max_answer_symbols: int, call_bonus: float):
    """Args: max_answer_symbols: answers have 1 to that many, each as often.
    call_bonus: reward of the first look-up."""
    self._max_answer_symbols = max_answer_symbols
    self._call_bonus = call_bonus
    most = max(_MAX_KEY_SYMBOLS, max_answer_symbols + 1) + 1
    self.character_limits = task.Limits(
      max_turns=2,
      max_turn_tokens=most,
      max_observation_tokens=most,
      max_tokens=4 * most,
    )

  def start(self, generator: np.random.Generator) -> task.Instance:
    draw = lambda most: symbols.draw_symbols(
      generator, int(generator.integers(1, most + 1))
    )
    asked, answer = draw(_MAX_KEY_SYMBOLS), draw(self._max_answer_symbols)

    @tool.tool(timeout_s=None)
    def lookup(key: str = '') -> str:
      """Looks a key up.

      Args:
        key: the user's; the same if left out.
      """
      if key not in ('', asked):
        raise taxonomy.ToolError(f'the user did not ask for {key}')
      return answer

    def oracle(episode: task.Transcript) -> calls.Call | str:
      if not episode.turns:
        return calls.Call('lookup', {'key': asked})
      return episode.calls[0].result

    return task.Instance(
      messages=[
        {'role': 'system', 'content': _INSTRUCTIONS},
        {'role': 'user', 'content': asked},
      ],
      tools=[lookup],
      score=lambda episode: _score(episode, answer),
      turn_reward=self._turn_reward,
      next_messages=_next_messages,
      oracle=oracle,
    )

  def _turn_reward(self, episode: task.Transcript) -> float:
    looked_up = [_is_answered(turn) for turn in episode.turns]
    is_first = looked_up[-1] and sum(looked_up) == 1
    return self._call_bonus if is_first else 0.0


def _is_answered(turn: transcript.Turn) -> bool:
  return any(call.error is None for call in turn.calls)


def _next_messages(
  episode: task.Transcript,
) -> Sequence[tokeniser.Message] | None:
  if len(episode.turns) == 2:
    return None
  return task.until_answer(episode)


def _score(episode: task.Transcript, answer: str) -> float:
  if episode.turns[-1].calls:
    return 0.0
  text = episode.answer.strip()
  right = sum(a == b for a, b in zip(text, answer))
  return right / max(len(text), len(answer))


def make(name: str, argument: str) -> LookupTask:
  """Makes lookup, or lookup/<most answer symbols>[/<call bonus>].

  Raises:
    errors.UserError: the argument is not of that form.
  """
  del name
  count, _, bonus = argument.partition('/')
  try:
    max_answer_symbols = int(count or 1)
    call_bonus = float(bonus or _DEFAULT_CALL_BONUS)
  except ValueError:
    max_answer_symbols, call_bonus = 0, 0.0
  if max_answer_symbols < 1 or not 0 <= call_bonus <= 1:
    raise errors.UserError(
      f'argument ({argument!r}) of tool:lookup must be the most symbols of an '
      'answer, >= 1, and the reward of a call, 0 to 1, as in tool:lookup/2/0.1'
    )
  return LookupTask(
    max_answer_symbols=max_answer_symbols, call_bonus=call_bonus
  )
