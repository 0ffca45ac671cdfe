"""Questions to a replay server, each answered by a deadline."""

from __future__ import annotations

import threading
import time

from reverb.cc import schema_pb2

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import table_info
from tunix_reverb.replay import tables
from tunix_reverb.replay.reverb_client import connection

_POLL_S = 0.1


def wait_for_server(
  address: str, timeout_s: float, stop: threading.Event | None = None
) -> bool:
  """Waits until the server at `address` answers.

  Args:
    address: 'host:port'.
    timeout_s: seconds to wait for it.
    stop: ends the wait early when set.

  Returns:
    Whether it answers; False only if `stop` was set.

  Raises:
    errors.ReplayUnavailableError: no answer within `timeout_s`.
  """
  answered = threading.Event()

  def ask() -> None:
    client = connection.connect(address)
    while time.monotonic() < deadline_s and not (stop and stop.is_set()):
      try:
        connection.table_infos(client, 1.0)
        answered.set()
        return
      except connection.STATUS_ERRORS:
        time.sleep(_POLL_S)

  deadline_s = time.monotonic() + timeout_s
  threading.Thread(target=ask, daemon=True, name=f'ask {address}').start()
  while time.monotonic() < deadline_s:
    if stop is not None and stop.is_set():
      return False
    if answered.wait(min(_POLL_S, timeout_s)):
      return True
  raise _unavailable(address, timeout_s)


def describe(
  address: str, timeout_s: float
) -> dict[str, tables.TableDescription]:
  """What the server at `address` serves, by table name.

  Raises:
    errors.ReplayUnavailableError: no answer within `timeout_s`.
  """
  infos = _ask(address, timeout_s)
  return {name: table_info.describe(info) for name, info in infos.items()}


def limiter_state(
  address: str, timeout_s: float
) -> dict[str, tables.LimiterState]:
  """The state of each table's rate limiter, by table name.

  Raises:
    errors.ReplayUnavailableError: no answer within `timeout_s`.
  """
  infos = _ask(address, timeout_s)
  return {name: table_info.limiter_state(info) for name, info in infos.items()}


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


def _ask(address: str, timeout_s: float) -> dict[str, schema_pb2.TableInfo]:
  try:
    return connection.run_with_deadline(
      lambda: connection.table_infos(connection.connect(address), timeout_s),
      timeout_s,
      f'the question to replay server {address}',
    )
  except (*connection.STATUS_ERRORS, errors.DeadlineExceededError) as e:
    raise _unavailable(address, timeout_s) from e


def _unavailable(
  address: str, timeout_s: float
) -> errors.ReplayUnavailableError:
  return errors.ReplayUnavailableError(
    f'replay server {address} did not answer within {timeout_s:g} s; is it '
    'running, is the address right, and does no_proxy hold its host?'
  )
