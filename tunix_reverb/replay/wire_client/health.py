"""Whether a replay server still answers; see `replay.health`."""

from __future__ import annotations

from tunix_reverb import errors
from tunix_reverb.replay import health
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import protocol

_PROBE_TIMEOUT_S = 1.0


class HealthCheck(health.HealthCheck):
  """Asks over a channel of its own, which nothing large can hold up."""

  def __init__(self, address: str, period_s: float = 1.0):
    """See base class."""
    self._channel = connection.open_channel(address)
    super().__init__(address, period_s)

  def close(self) -> None:
    """See base class."""
    super().close()
    self._channel.close()

  def _ask(self) -> None:
    try:
      connection.call(
        self._channel,
        'ServerInfo',
        protocol.ServerInfoRequest(),
        _PROBE_TIMEOUT_S,
      )
    except connection.StatusError as e:
      raise errors.ReplayUnavailableError(connection.status_text(e)) from e
    except ValueError as e:  # `close` came first.
      raise errors.ReplayUnavailableError(str(e)) from e
