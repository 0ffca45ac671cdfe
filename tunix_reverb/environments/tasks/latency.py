"""An environment that takes its time, as much as one says, for measurements.

  latency                        3 turns, 0.1 s each
  latency/0.5                    3 turns, 0.5 s each
  latency/0.5/10                 10 turns
  latency/0.5/10/exponential     of 0.5 s on average
  latency/0.5/10/lognormal       the same, with a heavy tail (sigma = 1)

Whatever the policy says is answered after that time; every episode earns 1, so
there is nothing to learn.
The times are a function of the task's seed and the episode's number.
"""

from __future__ import annotations

from collections.abc import Sequence
import time

import numpy as np

from tunix_reverb import errors
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import transcript
from tunix_reverb.text import tokeniser

DISTRIBUTIONS = ('constant', 'exponential', 'lognormal')
_DEFAULT_MEAN_S = 0.1
_DEFAULT_TURNS = 3
_SIGMA = 1.0


class LatencyTask(task.Task):
  """See the module's docstring."""

  def __init__(self, *, mean_s: float, num_turns: int, distribution: str):
    """Args: mean_s: seconds of a turn. num_turns: of an episode.
    distribution: of the seconds, one of `DISTRIBUTIONS`."""
    self._mean_s = mean_s
    self._num_turns = num_turns
    self._distribution = distribution
    self.limits = self.character_limits = task.Limits(
      max_turns=num_turns,
      max_turn_tokens=8,
      max_observation_tokens=8,
      max_tokens=16 * (num_turns + 1),
    )

  def start(self, generator: np.random.Generator) -> task.Instance:
    delays_s = self._draw(generator)

    def next_messages(
      episode: task.Transcript,
    ) -> Sequence[tokeniser.Message] | None:
      number = len(episode.turns)
      episode.turns[-1].calls.append(_wait(float(delays_s[number - 1])))
      if number == self._num_turns:
        return None
      return [{'role': 'user', 'content': str(number % 10)}]

    return task.Instance(
      messages=[{'role': 'user', 'content': '0'}],
      score=lambda episode: 1.0,
      next_messages=next_messages,
    )

  def _draw(self, generator: np.random.Generator) -> np.ndarray:
    """Seconds of each turn, f64 [num_turns]."""
    if self._distribution == 'constant':
      return np.full(self._num_turns, self._mean_s)
    if self._distribution == 'exponential':
      return generator.exponential(self._mean_s, self._num_turns)
    # exp(-sigma^2 / 2) makes the mean 1.
    factors = generator.lognormal(-(_SIGMA**2) / 2, _SIGMA, self._num_turns)
    return self._mean_s * factors


def _wait(delay_s: float) -> transcript.ToolCall:
  started_at_s, start = time.time(), time.monotonic()
  time.sleep(delay_s)
  return transcript.ToolCall(
    name='wait',
    arguments={'delay_s': delay_s},
    started_at_s=started_at_s,
    duration_s=time.monotonic() - start,
    num_attempts=1,
  )


def make(name: str, argument: str) -> LatencyTask:
  """Makes latency[/<mean seconds>[/<turns>[/<distribution>]]].

  Raises:
    errors.UserError: the argument is not of that form.
  """
  del name
  mean, turns, distribution, *rest = [*argument.split('/'), '', '', ''][:4]
  try:
    mean_s = float(mean or _DEFAULT_MEAN_S)
    num_turns = int(turns or _DEFAULT_TURNS)
  except ValueError:
    mean_s, num_turns = -1.0, 0
  distribution = distribution or DISTRIBUTIONS[0]
  if (
    not 0 <= mean_s < float('inf')
    or num_turns < 1
    or distribution not in DISTRIBUTIONS
    or any(rest)
  ):
    raise errors.UserError(
      f'argument ({argument!r}) of tool:latency must be seconds >= 0, a number '
      f'of turns >= 1 and one of {", ".join(DISTRIBUTIONS)}, as in '
      'tool:latency/0.5/10/lognormal'
    )
  return LatencyTask(
    mean_s=mean_s, num_turns=num_turns, distribution=distribution
  )
