"""Makes a replay server and its clients; callers know no implementation.

Everything is imported when it is made, so that importing this module loads
neither Reverb nor TensorFlow. Another client, such as one that speaks gRPC by
itself, would be chosen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import pathlib
import threading
from typing import Any

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.replay import tables


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


def make_variable_sink(address: str, **kwargs: Any) -> core.VariableSink:
  """Where the learner publishes; see `ReverbVariableSink`."""
  from tunix_reverb.replay.reverb_client import variables

  return variables.ReverbVariableSink(address, **kwargs)


def make_variable_source(address: str, **kwargs: Any) -> core.VariableSource:
  """Where actors get variables; see `ReverbVariableSource`."""
  from tunix_reverb.replay.reverb_client import variables

  return variables.ReverbVariableSource(address, **kwargs)


def wait_for_server(
  address: str, timeout_s: float, stop: threading.Event | None = None
) -> bool:
  """See `reverb_client.admin.wait_for_server`."""
  from tunix_reverb.replay.reverb_client import admin

  return admin.wait_for_server(address, timeout_s, stop)


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
