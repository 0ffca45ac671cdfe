"""Questions to a replay server, each answered by a deadline."""

from __future__ import annotations

import threading
import time

from reverb.cc import schema_pb2

from tunix_reverb import errors
from tunix_reverb import types
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
  return {name: _describe(info) for name, info in infos.items()}


def limiter_state(
  address: str, timeout_s: float
) -> dict[str, tables.LimiterState]:
  """The state of each table's rate limiter, by table name.

  Raises:
    errors.ReplayUnavailableError: no answer within `timeout_s`.
  """
  infos = _ask(address, timeout_s)
  return {name: _limiter_state(info) for name, info in infos.items()}


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
  served = describe(address, timeout_s)
  if tables.TRAJECTORIES not in served:
    raise errors.SpecMismatchError(
      f'replay server {address} must serve a table {tables.TRAJECTORIES!r}; it '
      f'serves {", ".join(sorted(served)) or "none"}: is it another program?'
    )
  lines = tables.differences(
    tables.describe(table_config, columns),
    served[tables.TRAJECTORIES],
    'the server',
  )
  if lines:
    raise errors.SpecMismatchError(
      f'this run and replay server {address} must agree: {"; ".join(lines)}. '
      'Start every role with the same flags'
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


def _limiter_state(info: schema_pb2.TableInfo) -> tables.LimiterState:
  limiter = info.rate_limiter_info
  inserts = limiter.insert_stats.completed
  samples = limiter.sample_stats.completed
  ratio, min_size = limiter.samples_per_insert, limiter.min_size_to_sample
  return tables.LimiterState(
    current_size=info.current_size,
    max_size=info.max_size,
    inserts_completed=inserts,
    samples_completed=samples,
    # The limiter's own rules; what it knows of deletes is the table's size.
    can_insert=(
      info.current_size + 1 <= min_size
      or (inserts + 1) * ratio - samples <= limiter.max_diff
    ),
    can_sample=(
      info.current_size >= min_size
      and inserts * ratio - samples - 1 >= limiter.min_diff
    ),
    inserts_blocked_s=info.table_worker_time.waiting_for_sampling_ms / 1000,
    samples_blocked_s=info.table_worker_time.waiting_for_inserts_ms / 1000,
  )


def _describe(info: schema_pb2.TableInfo) -> tables.TableDescription:
  limiter = info.rate_limiter_info
  sampler = info.sampler_options
  kind = sampler.WhichOneof('distribution') or 'unknown'
  prioritised = kind == 'prioritized'
  return tables.TableDescription(
    name=info.name,
    mode='queue' if info.max_times_sampled == 1 else 'replay',
    sampler='prioritised' if prioritised else kind,
    priority_exponent=(
      sampler.prioritized.priority_exponent if prioritised else 0.0
    ),
    max_items=info.max_size,
    min_items=limiter.min_size_to_sample,
    samples_per_insert=limiter.samples_per_insert,
    min_diff=limiter.min_diff,
    max_diff=limiter.max_diff,
    signature=connection.signature_of(info),
  )
