"""Serves the endpoint from a thread of its own."""

from __future__ import annotations

import socket
import threading
from typing import Any

from tunix_reverb import errors

_STOP_DEADLINE_S = 3.0
_BACKLOG = 1024


class Server:
  """An ASGI application behind a port; `close` ends it."""

  def __init__(self, app: Any, *, host: str, port: int):
    """Listens from now on.

    Args:
      app: of the endpoint.
      host: address to listen on.
      port: 0 takes a free one.

    Raises:
      errors.UserError: the port cannot be had.
    """
    import uvicorn

    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    self._socket = socket.socket(family, socket.SOCK_STREAM)
    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      self._socket.bind((host, port))
      # Whoever connects from now on is served once the thread is there.
      self._socket.listen(_BACKLOG)
    except OSError as e:
      self._socket.close()
      raise errors.UserError(
        f'endpoint_port ({port}) of {host} must be free: {e.strerror}'
      ) from e
    self.port = self._socket.getsockname()[1]
    config = uvicorn.Config(
      app,
      log_level='warning',
      lifespan='on',
      timeout_graceful_shutdown=1,
    )
    self._server = uvicorn.Server(config)
    self._thread = threading.Thread(
      target=self._server.run,
      kwargs={'sockets': [self._socket]},
      name='endpoint',
      daemon=True,
    )
    self._thread.start()

  def close(self) -> None:
    """Refuses new requests, cuts those under way; idempotent."""
    self._server.should_exit = True
    self._thread.join(_STOP_DEADLINE_S)
    self._socket.close()
