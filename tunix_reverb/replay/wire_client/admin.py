"""Questions and orders to a replay server, each done by a deadline.

Every function takes the server as an address, 'host:port', or as a channel of
`connection.open_channel`, which saves whoever asks often the connecting.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import math
import threading
import time
from typing import Any

import grpc

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import table_info
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import protocol

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 1.0

# Statuses of a server that is not there, or not in time.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

Server = str | grpc.Channel


def wait_for_server(
  server: Server, timeout_s: float, stop: threading.Event | None = None
) -> bool:
  """Waits until the server answers.

  Args:
    server: address or channel.
    timeout_s: seconds to wait for it.
    stop: ends the wait early when set, within a second or so.

  Returns:
    Whether it answers; False only if `stop` was set.

  Raises:
    errors.ReplayUnavailableError: no answer within `timeout_s`.
  """
  stop = stop or threading.Event()
  deadline_s = time.monotonic() + timeout_s
  with _channel(server) as channel:
    while not stop.is_set():
      left_s = deadline_s - time.monotonic()
      try:
        info(channel, min(max(left_s, 0.0), _PROBE_TIMEOUT_S))
        return True
      except errors.ReplayUnavailableError as e:
        if left_s <= _POLL_S:
          raise _unavailable(server, timeout_s, e.__cause__) from e.__cause__
      stop.wait(_POLL_S)
  return False


def info(server: Server, timeout_s: float) -> dict[str, Any]:
  """The `TableInfo` of each table, by its name.

  Raises:
    errors.ReplayUnavailableError: no answer within `timeout_s`.
  """
  with _channel(server) as channel:
    try:
      response = connection.call(
        channel, 'ServerInfo', protocol.ServerInfoRequest(), timeout_s
      )
    except connection.StatusError as e:
      raise _unavailable(server, timeout_s, e) from e
  return {table.name: table for table in response.table_info}


def describe(
  server: Server, timeout_s: float
) -> dict[str, tables.TableDescription]:
  """What the server serves, by table name.

  Raises:
    errors.ReplayUnavailableError: no answer within `timeout_s`.
  """
  infos = info(server, timeout_s)
  return {name: table_info.describe(table) for name, table in infos.items()}


def limiter_state(
  server: Server, timeout_s: float
) -> dict[str, tables.LimiterState]:
  """The state of each table's rate limiter, by table name.

  Raises:
    errors.ReplayUnavailableError: no answer within `timeout_s`.
  """
  infos = info(server, timeout_s)
  return {
    name: table_info.limiter_state(table) for name, table in infos.items()
  }


def check_signature(
  address: str,
  columns: types.Trajectories,
  table_config: tables.TableConfig,
  timeout_s: float,
) -> None:
  """Refuses a server whose trajectory table differs from what this run needs.

  Raises:
    errors.SpecMismatchError: it differs; every difference is listed.
    errors.ReplayUnavailableError: no answer within `timeout_s`.
  """
  table_info.check_signature(
    address, describe(address, timeout_s), columns, table_config
  )


def delete_items(
  server: Server, table: str, keys: Iterable[int], timeout_s: float
) -> None:
  """Deletes items by key; keys that the table does not hold are ignored.

  The limiter counts a delete for the table's size, not for its balance: a
  Queue never gets the room back, and in a ratio table the survivors are sampled
  more often. Delete only where something else keeps the balance.

  Raises:
    errors.SpecMismatchError: the server has no such table.
    errors.DeadlineExceededError: not done within `timeout_s`; the same call
      may be repeated.
    errors.ReplayUnavailableError: the server is gone or refuses.
  """
  request = protocol.MutatePrioritiesRequest(table=table, delete_keys=keys)
  _order(server, 'MutatePriorities', request, timeout_s)


def update_priorities(
  server: Server,
  table: str,
  priorities: Mapping[int, float],
  timeout_s: float,
) -> None:
  """Sets the priorities of items by key; unknown keys are ignored.

  Raises:
    ValueError: a priority is negative or not finite.
    Others: see `delete_items`.
  """
  for key, priority in priorities.items():
    if not (math.isfinite(priority) and priority >= 0):
      raise ValueError(
        f'priority ({priority}) of item {key} must be finite and >= 0: another '
        'one would end a prioritised table'
      )
  request = protocol.MutatePrioritiesRequest(table=table)
  for key, priority in priorities.items():
    request.updates.add(key=key, priority=priority)
  _order(server, 'MutatePriorities', request, timeout_s)


def reset(server: Server, table: str, timeout_s: float) -> None:
  """Removes every item of a table and starts its limiter anew.

  Raises:
    See `delete_items`.
  """
  _order(server, 'Reset', protocol.ResetRequest(table=table), timeout_s)


def checkpoint(server: Server, timeout_s: float) -> str:
  """Lets the server write a checkpoint; returns the path on its own disk.

  It lies in the server's working directory, where the next one replaces it. A
  server of this package restores those that it wrote by itself, since it keeps
  these apart.

  Raises:
    errors.CheckpointError: it could not be written.
    errors.DeadlineExceededError: not done within `timeout_s`; the server goes
      on writing it.
    errors.ReplayUnavailableError: the server is gone.
  """
  request = protocol.CheckpointRequest()
  with _channel(server) as channel:
    try:
      answer = connection.call(channel, 'Checkpoint', request, timeout_s)
      return answer.checkpoint_path
    except connection.StatusError as e:
      if e.code() in _GONE:
        raise _not_done(server, 'Checkpoint', timeout_s, e) from e
      raise errors.CheckpointError(
        f'{_name(server)} could not write a checkpoint '
        f'({connection.status_text(e)}); is its disk full?'
      ) from e


def _order(server: Server, method: str, request: Any, timeout_s: float) -> None:
  """Calls a method that changes a table; errors in the user's words."""
  with _channel(server) as channel:
    try:
      connection.call(channel, method, request, timeout_s)
    except connection.StatusError as e:
      if e.code() == grpc.StatusCode.NOT_FOUND:
        served = info(channel, _PROBE_TIMEOUT_S)
        raise table_info.missing_table(
          _address(server), request.table, served
        ) from e
      raise _not_done(server, method, timeout_s, e) from e


@contextlib.contextmanager
def _channel(server: Server) -> Iterator[grpc.Channel]:
  """The channel given, or one to the address given, closed at the end."""
  if not isinstance(server, str):
    yield server
    return
  with connection.open_channel(server) as channel:
    yield channel


def _address(server: Server) -> str:
  return server if isinstance(server, str) else 'of this channel'


def _name(server: Server) -> str:
  return f'replay server {_address(server)}'


def _not_done(
  server: Server, method: str, timeout_s: float, error: grpc.RpcError
) -> Exception:
  if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
    return errors.DeadlineExceededError(
      f'{method} of {_name(server)} was not done within {timeout_s:g} s'
    )
  return _unavailable(server, timeout_s, error)


def _unavailable(
  server: Server, timeout_s: float, error: grpc.RpcError
) -> errors.ReplayUnavailableError:
  return errors.ReplayUnavailableError(
    f'{_name(server)} did not answer within {timeout_s:g} s; is it running, '
    f'and is the address right? ({connection.status_text(error)})'
  )
