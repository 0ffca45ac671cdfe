"""Makes a replay server and its clients; callers know no implementation.

Everything is imported when it is made, so that importing this module loads
neither Reverb nor TensorFlow. Another client, such as one that speaks gRPC by
itself, would be chosen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import pathlib
import threading
import time
from typing import Any
from typing import Protocol

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.replay import tables

# For a server that answered a moment ago.
_ANSWER_TIMEOUT_S = 10.0


def make_server(
  *,
  config: tables.TableConfig,
  columns: types.Trajectories,
  port: int,
  checkpoint_dir: pathlib.Path | None,
  checkpoints_to_keep: int = 2,
  restore: bool = True,
) -> Any:
  """Starts a replay server; see `reverb_client.server.ReplayServer`."""
  from tunix_reverb.replay.reverb_client import server

  return server.ReplayServer(
    config=config,
    columns=columns,
    port=port,
    checkpoint_dir=checkpoint_dir,
    checkpoints_to_keep=checkpoints_to_keep,
    restore=restore,
  )


def make_writer(
  address: str, *, columns: types.Trajectories, **kwargs: Any
) -> core.ItemWriter:
  """An item writer; see `reverb_client.writer.OfficialItemWriter`."""
  from tunix_reverb.replay.reverb_client import writer

  return writer.OfficialItemWriter(address, columns=columns, **kwargs)


def make_sampler(
  addresses: Sequence[str], *, columns: types.Trajectories, **kwargs: Any
) -> core.ItemSampler:
  """An item sampler; see `reverb_client.sampler.OfficialItemSampler`."""
  from tunix_reverb.replay.reverb_client import sampler

  return sampler.OfficialItemSampler(addresses, columns=columns, **kwargs)


def make_variable_sink(
  address: str, *, run_dir: pathlib.Path | None = None, **kwargs: Any
) -> core.VariableSink:
  """Where the learner publishes; see `ReverbVariableSink`.

  Args:
    address: 'host:port' of the first replay server.
    run_dir: variables too large for the table go to `<run_dir>/variables`.
    **kwargs: of the sink.
  """
  from tunix_reverb.replay.reverb_client import variables

  directory = run_dir / 'variables' if run_dir is not None else None
  return variables.ReverbVariableSink(address, directory=directory, **kwargs)


def make_variable_source(address: str, **kwargs: Any) -> core.VariableSource:
  """Where actors get variables; see `ReverbVariableSource`."""
  from tunix_reverb.replay.reverb_client import variables

  return variables.ReverbVariableSource(address, **kwargs)


class _Watchdog(Protocol):
  """What `connect` needs of `telemetry.watchdog.Watchdog`."""

  def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
    """Names a wait."""


def connect(
  addresses: Sequence[str],
  *,
  columns: types.Trajectories,
  table_config: tables.TableConfig,
  watchdog: _Watchdog,
  stop: threading.Event,
  timeout_s: float,
) -> None:
  """Waits for every server and refuses one that serves something else.

  Returns early, unchecked, when `stop` is set.

  Args:
    addresses: 'host:port' of each server.
    columns: `Trajectories` of `ColumnSpec` of this run.
    table_config: the trajectory table of this run.
    watchdog: names the waits.
    stop: ends them early.
    timeout_s: seconds to wait for each server.

  Raises:
    errors.SpecMismatchError: a server's table differs; everything is listed.
    errors.ReplayUnavailableError: a server did not answer in time.
  """
  for address in addresses:
    with watchdog.waiting(f'this role waits for replay server {address}'):
      if not wait_for_server(address, timeout_s, stop):
        return
      check_signature(
        address, columns, table_config, min(timeout_s, _ANSWER_TIMEOUT_S)
      )


def wait_for_server(
  address: str, timeout_s: float, stop: threading.Event | None = None
) -> bool:
  """See `reverb_client.admin.wait_for_server`."""
  from tunix_reverb.replay.reverb_client import admin

  return admin.wait_for_server(address, timeout_s, stop)


def served_version(address: str, stop: threading.Event) -> int:
  """The version of the variables that a server holds; 0 if it has none.

  Gives up early, with 0, when `stop` is set.

  Raises:
    errors.ReplayUnavailableError: the server does not answer.
  """
  state = limiter_state(address, _ANSWER_TIMEOUT_S)[tables.VARIABLES]
  if not state.current_size:
    return 0
  source = make_variable_source(address)
  try:
    deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
    while not stop.is_set() and time.monotonic() < deadline_s:
      variables = source.get_variables(0, 0.2)
      if variables is not None:
        return variables.policy_version
    return 0
  finally:
    source.close()


def describe(
  address: str, timeout_s: float
) -> Mapping[str, tables.TableDescription]:
  """See `reverb_client.admin.describe`."""
  from tunix_reverb.replay.reverb_client import admin

  return admin.describe(address, timeout_s)


def limiter_state(
  address: str, timeout_s: float
) -> Mapping[str, tables.LimiterState]:
  """See `reverb_client.admin.limiter_state`."""
  from tunix_reverb.replay.reverb_client import admin

  return admin.limiter_state(address, timeout_s)


def check_signature(
  address: str,
  columns: types.Trajectories,
  table_config: tables.TableConfig,
  timeout_s: float,
) -> None:
  """See `reverb_client.admin.check_signature`."""
  from tunix_reverb.replay.reverb_client import admin

  admin.check_signature(address, columns, table_config, timeout_s)
