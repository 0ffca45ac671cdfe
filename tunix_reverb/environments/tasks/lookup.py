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

from tunix_reverb.environments.tasks import bonus
from tunix_reverb.environments.tasks import symbols
from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool
from tunix_reverb.text import tokeniser

_MAX_KEY_SYMBOLS = 3
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
      turn_reward=bonus.of_first_call(self._call_bonus),
      next_messages=_next_messages,
      oracle=oracle,
    )


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
  count, call_bonus = bonus.parse(
    name, argument, what='the most symbols of an answer', default=1
  )
  return LookupTask(max_answer_symbols=count, call_bonus=call_bonus)
