"""What happens when an environment raises or does not answer."""

from __future__ import annotations

from collections.abc import Callable
import threading

from absl import logging
import dm_env

CAUSES = ('error', 'timeout')


class FailureLog:
  """Counts failures by cause and gives up in time.

  An environment that fails is replaced by a new one and its episode is cut;
  its next timestep is FIRST.

  Attributes:
    counts: failures so far by cause: 'error' (it raised) and 'timeout'.
  """

  def __init__(self, max_consecutive_failures: int):
    """Args: max_consecutive_failures: of one environment, without a completed
    `env.step` in between, that are tolerated."""
    if max_consecutive_failures < 0:
      raise ValueError(
        f'max_consecutive_failures ({max_consecutive_failures}) must be >= 0'
      )
    self._limit = max_consecutive_failures
    self._consecutive: dict[int, int] = {}
    self.counts = dict.fromkeys(CAUSES, 0)

  def record(self, index: int, cause: str, error: BaseException) -> int:
    """Notes a failure of environment `index`; returns how many in a row.

    Raises:
      RuntimeError: more in a row than tolerated; `error` is chained.
    """
    self.counts[cause] += 1
    in_a_row = self._consecutive.get(index, 0) + 1
    self._consecutive[index] = in_a_row
    logging.warning(
      'environment %d failed (%s, %d in a row) and is replaced: %r',
      index,
      cause,
      in_a_row,
      error,
    )
    if in_a_row > self._limit:
      raise RuntimeError(
        f'environment {index} failed {in_a_row} times in a row '
        f'(max_consecutive_failures is {self._limit}); the last cause: '
        f'{error!r}'
      ) from error
    return in_a_row

  def succeeded(self, index: int, step_type: dm_env.StepType) -> None:
    """Notes a timestep; only a completed `env.step` clears the count."""
    if self._consecutive and step_type != dm_env.StepType.FIRST:
      self._consecutive.pop(index, None)

  @property
  def failing(self) -> bool:
    """Whether an environment has failed since its last completed step."""
    return bool(self._consecutive)


def close_in_background(*closes: Callable[[], None]) -> threading.Thread:
  """Calls every `close` in one daemon thread: a hung one holds up nobody."""

  def run() -> None:
    for close in closes:
      try:
        close()
      except Exception as e:  # pylint: disable=broad-except
        logging.warning('an environment failed to close: %r', e)

  thread = threading.Thread(target=run, name='close_environments', daemon=True)
  thread.start()
  return thread
