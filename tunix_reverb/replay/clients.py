"""Makes a replay server and its clients; callers know no implementation.

Two clients speak to a server, by the names in `client_names`. What one needs is
imported when it is made: neither this module nor the wire client loads Reverb
or TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import importlib
import pathlib
import threading
import time
from typing import Any
from typing import Protocol

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import client_names
from tunix_reverb.replay import tables

# For a server that answered a moment ago.
_ANSWER_TIMEOUT_S = 10.0

_PACKAGES = {
  client_names.WIRE: 'wire_client',
  client_names.OFFICIAL: 'reverb_client',
}
_CLASSES = {
  client_names.WIRE: 'Wire',
  client_names.OFFICIAL: 'Official',
}


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
  return _module(client_names.OFFICIAL, 'server').ReplayServer(
    config=config,
    columns=columns,
    port=port,
    checkpoint_dir=checkpoint_dir,
    checkpoints_to_keep=checkpoints_to_keep,
    restore=restore,
  )


def make_sweeper(
  server: Any, *, columns: types.Trajectories, **kwargs: Any
) -> Any:
  """Sweeps what a server of this process serves; see `sweeper.Sweeper`.

  Args:
    server: of `make_server`; its table must be balanced by permits.
    columns: of the server.
    **kwargs: of the sweeper.
  """
  from tunix_reverb.replay import checkpoint_items
  from tunix_reverb.replay import checkpoints
  from tunix_reverb.replay import sweeper

  restored = None
  if server.restored_from is not None:
    restored = checkpoint_items.CheckpointItems(
      checkpoints.data_directory(server.restored_from), columns
    )
  return sweeper.Sweeper(server.address, restored=restored, **kwargs)


def make_writer(
  address: str,
  *,
  columns: types.Trajectories,
  client: str = client_names.DEFAULT,
  announce: bool = False,
  **kwargs: Any,
) -> core.ItemWriter:
  """An item writer; see `WireItemWriter` and `OfficialItemWriter`.

  Args:
    address: 'host:port' of the server.
    columns: the table's signature.
    client: which client to use.
    announce: see `WireItemWriter`, which alone can.
    **kwargs: of the writer.
  """
  if announce:
    # Permits bound what is under way: a narrow window would only slow it down.
    kwargs = {'announce': True, 'max_pending_items': 32, **kwargs}
  return _class(client, 'writer', 'ItemWriter')(
    address, columns=columns, **kwargs
  )


def make_sampler(
  addresses: Sequence[str],
  *,
  columns: types.Trajectories,
  client: str = client_names.DEFAULT,
  **kwargs: Any,
) -> core.ItemSampler:
  """An item sampler; see `WireItemSampler` and `OfficialItemSampler`."""
  return _class(client, 'sampler', 'ItemSampler')(
    addresses, columns=columns, **kwargs
  )


def make_variable_sink(
  address: str,
  *,
  run_dir: pathlib.Path | None = None,
  client: str = client_names.DEFAULT,
  **kwargs: Any,
) -> core.VariableSink:
  """Where the learner publishes; see `variable_exchange.VariableSink`.

  Args:
    address: 'host:port' of the first replay server.
    run_dir: variables too large for the table go to `<run_dir>/variables`.
    client: which client to use.
    **kwargs: of the sink.
  """
  directory = run_dir / 'variables' if run_dir is not None else None
  return _module(client, 'variables').make_sink(
    address, directory=directory, **kwargs
  )


def make_variable_source(
  address: str, *, client: str = client_names.DEFAULT, **kwargs: Any
) -> core.VariableSource:
  """Where actors get variables; see `variable_exchange.VariableSource`."""
  return _module(client, 'variables').make_source(address, **kwargs)


def make_permit_table(addresses: Sequence[str]) -> Any:
  """The learner's end of admission; see `permits.WirePermitTable`."""
  from tunix_reverb.replay import permits

  return permits.WirePermitTable(addresses)


def make_permit_source(address: str) -> core.PermitSource:
  """An actor's end of admission; see `permits.WirePermitSource`."""
  from tunix_reverb.replay import permits

  return permits.WirePermitSource(address)


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
  client: str = client_names.DEFAULT,
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
    client: which client to use.

  Raises:
    errors.SpecMismatchError: a server's table differs; everything is listed.
    errors.ReplayUnavailableError: a server did not answer in time.
  """
  for address in addresses:
    with watchdog.waiting(f'this role waits for replay server {address}'):
      if not wait_for_server(address, timeout_s, stop, client=client):
        return
      check_signature(
        address,
        columns,
        table_config,
        min(timeout_s, _ANSWER_TIMEOUT_S),
        client=client,
      )


def wait_for_server(
  address: str,
  timeout_s: float,
  stop: threading.Event | None = None,
  *,
  client: str = client_names.DEFAULT,
) -> bool:
  """See `wire_client.admin.wait_for_server`."""
  return _module(client, 'admin').wait_for_server(address, timeout_s, stop)


def served_version(
  address: str,
  stop: threading.Event,
  *,
  client: str = client_names.DEFAULT,
) -> int:
  """The version of the variables that a server holds; 0 if it has none.

  Gives up early, with 0, when `stop` is set.

  Raises:
    errors.ReplayUnavailableError: the server does not answer.
  """
  if stop.is_set():
    return 0
  try:
    state = limiter_state(address, _ANSWER_TIMEOUT_S, client=client)
  except errors.ReplayUnavailableError:
    if stop.is_set():
      return 0
    raise
  if not state[tables.VARIABLES].current_size:
    return 0
  source = make_variable_source(address, client=client)
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
  address: str, timeout_s: float, *, client: str = client_names.DEFAULT
) -> Mapping[str, tables.TableDescription]:
  """See `wire_client.admin.describe`."""
  return _module(client, 'admin').describe(address, timeout_s)


def limiter_state(
  address: str, timeout_s: float, *, client: str = client_names.DEFAULT
) -> Mapping[str, tables.LimiterState]:
  """See `wire_client.admin.limiter_state`."""
  return _module(client, 'admin').limiter_state(address, timeout_s)


def check_signature(
  address: str,
  columns: types.Trajectories,
  table_config: tables.TableConfig,
  timeout_s: float,
  *,
  client: str = client_names.DEFAULT,
) -> None:
  """See `wire_client.admin.check_signature`."""
  _module(client, 'admin').check_signature(
    address, columns, table_config, timeout_s
  )


def _class(client: str, module: str, name: str) -> Any:
  return getattr(_module(client, module), _CLASSES.get(client, '') + name)


def _module(client: str, name: str) -> Any:
  """A module of a client's package.

  Raises:
    ValueError: there is no such client.
    errors.MissingExtraError: dm-reverb is not installed.
  """
  if client not in _PACKAGES:
    raise ValueError(
      f'client ({client!r}) must be one of {", ".join(client_names.CLIENTS)}'
    )
  try:
    return importlib.import_module(
      f'tunix_reverb.replay.{_PACKAGES[client]}.{name}'
    )
  except ModuleNotFoundError as e:
    if (e.name or '').partition('.')[0] not in ('reverb', 'tensorflow'):
      raise
    raise errors.MissingExtraError(
      'the replay server and --replay_client=official need dm-reverb, which '
      'only Python 3.11 or older on x86-64 Linux can have: install '
      'tunix_reverb[reverb]'
    ) from e
