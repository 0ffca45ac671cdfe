"""How long a writer was blocked, and by what."""

from __future__ import annotations

from collections.abc import Callable

from tunix_reverb import errors
from tunix_reverb.replay import health
from tunix_reverb.replay import table_info
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import connection

_PROBE_TIMEOUT_S = 1.0


class BackPressure(health.HealthCheck):
  """Blames blocked time on the rate limiter or on the network.

  From within a stream one looks like the other. So the server is asked, once a
  period while time is spent blocked: if the limiter would take no insert then,
  it is to blame for the time since the last question; else the network is, and
  the work of getting items across it.

  Args:
    address: 'host:port'.
    table: whose limiter it is.
    on_answer: called with whether the limiter blocks inserts after every
      question, None if there was no answer.
    period_s: between two questions.

  Attributes:
    limiter_s: seconds blocked by the rate limiter.
    network_s: seconds blocked by anything else.
  """

  def __init__(
    self,
    address: str,
    table: str,
    on_answer: Callable[[bool | None], None],
    period_s: float = 1.0,
  ):
    """Starts to ask."""
    self.limiter_s = 0.0
    self.network_s = 0.0
    self._table = table
    self._on_answer = on_answer
    self._blocked_s = 0.0  # Whoever is to blame.
    self._channel = connection.open_channel(address)
    super().__init__(address, period_s)

  @property
  def blocked_s(self) -> float:
    """All of it, also what nobody has been blamed for yet."""
    return self._blocked_s

  def add(self, seconds: float) -> None:
    """Notes time spent blocked."""
    self._blocked_s += seconds

  def close(self) -> None:
    """See base class."""
    super().close()
    self._channel.close()

  def _is_due(self) -> bool:
    unblamed_s = self._blocked_s - self.limiter_s - self.network_s
    return unblamed_s > 0 or super()._is_due()

  def _ask(self) -> None:
    blocked_s = self._blocked_s
    limited = None
    try:
      limited = self._ask_limiter()
    finally:
      if limited:
        self.limiter_s = blocked_s - self.network_s
      else:
        self.network_s = blocked_s - self.limiter_s
      self._on_answer(limited)

  def _ask_limiter(self) -> bool:
    """Whether the limiter blocks inserts; ReplayUnavailableError if silent."""
    try:
      infos = admin.info(self._channel, _PROBE_TIMEOUT_S)
    except ValueError as e:  # `close` came first.
      raise errors.ReplayUnavailableError(str(e)) from e
    info = infos.get(self._table)
    return info is not None and not table_info.limiter_state(info).can_insert
