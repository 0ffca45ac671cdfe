"""What tasks with one tool share: their arguments, and the reward of a call."""

from __future__ import annotations

from collections.abc import Callable

from tunix_reverb import errors
from tunix_reverb.environments.tools import task

_DEFAULT_BONUS = 0.1


def parse(
  name: str, argument: str, *, what: str, default: int
) -> tuple[int, float]:
  """Reads `<count>[/<call bonus>]`, either of which may be left out.

  Args:
    name: of the task.
    argument: what stands after it.
    what: there is a number of.
    default: number.

  Raises:
    errors.UserError: it is not of that form.
  """
  count, _, bonus = argument.partition('/')
  try:
    number, reward = int(count or default), float(bonus or _DEFAULT_BONUS)
  except ValueError:
    number, reward = 0, 0.0
  if number < 1 or not 0 <= reward <= 1:
    raise errors.UserError(
      f'argument ({argument!r}) of tool:{name} must be {what}, >= 1, and the '
      f'reward of a call, 0 to 1, as in tool:{name}/{default}/{_DEFAULT_BONUS}'
    )
  return number, reward


def of_first_call(bonus: float) -> Callable[[task.Transcript], float]:
  """A `turn_reward`: `bonus` for the first turn with a call that worked."""

  def turn_reward(episode: task.Transcript) -> float:
    worked = [any(c.error is None for c in t.calls) for t in episode.turns]
    return bonus if worked[-1] and sum(worked) == 1 else 0.0

  return turn_reward
