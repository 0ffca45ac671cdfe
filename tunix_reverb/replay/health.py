"""Whether a replay server still answers, for those who wait for something else.

A wait for a rate limiter and a wait for a dead server look alike from within a
blocked call or stream. This tells them apart.
"""

from __future__ import annotations

import abc
import logging
import threading
import time

from tunix_reverb import errors


class HealthCheck(abc.ABC):
  """How long ago a server was last heard from; asks it when nobody else does.

  A daemon thread asks. Each client says how, in `_ask`.
  """

  def __init__(self, address: str, period_s: float = 1.0):
    """Args: address: 'host:port'. period_s: silence before it is asked."""
    self._address = address
    self._period_s = period_s
    self._heard_at_s = time.monotonic()
    self._stop = threading.Event()
    threading.Thread(
      target=self._run, daemon=True, name=f'health of {address}'
    ).start()

  def heard(self) -> None:
    """Notes that the server answered just now."""
    self._heard_at_s = time.monotonic()

  def silent_s(self) -> float:
    """Seconds since the server was last heard from."""
    return time.monotonic() - self._heard_at_s

  def close(self) -> None:
    """Ends the checks."""
    self._stop.set()

  @abc.abstractmethod
  def _ask(self) -> None:
    """Returns when the server has answered, within a second or so.

    Raises:
      errors.ReplayUnavailableError: it has not.
    """

  def _is_due(self) -> bool:
    """Whether to ask now."""
    return self.silent_s() >= self._period_s

  def _run(self) -> None:
    was_silent = False
    while not self._stop.wait(self._period_s):
      if not self._is_due():
        continue
      try:
        self._ask()
      except errors.ReplayUnavailableError:
        if not was_silent and self.silent_s() > 3 * self._period_s:
          was_silent = True
          logging.warning(
            'replay server %s has not answered for %.0f s',
            self._address,
            self.silent_s(),
          )  # pyformat: skip
        continue
      self.heard()
      if was_silent:
        was_silent = False
        logging.info('replay server %s answers again', self._address)
