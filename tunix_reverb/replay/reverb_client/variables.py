"""Variables through Reverb's C++ client; see `replay.variable_exchange`."""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
from typing import Any

import numpy as np
import reverb
from reverb import pybind
import tensorflow as tf

from tunix_reverb import errors
from tunix_reverb.replay import publications
from tunix_reverb.replay import table_info
from tunix_reverb.replay import tables
from tunix_reverb.replay import variable_exchange
from tunix_reverb.replay.reverb_client import connection

_CONNECT_TIMEOUT_S = 1


def make_table() -> reverb.Table:
  """The table that holds the newest variables, new and empty."""
  return reverb.Table(
    name=tables.VARIABLES,
    sampler=reverb.selectors.Lifo(),
    remover=reverb.selectors.Fifo(),
    max_size=1,
    rate_limiter=reverb.rate_limiters.MinSize(1),
    signature={
      name: tf.TensorSpec(spec.shape, spec.dtype, name)
      for name, spec in publications.COLUMNS.items()
    },
  )


def make_sink(
  address: str, *, directory: pathlib.Path | None = None, **kwargs: Any
) -> variable_exchange.VariableSink:
  """Where the learner publishes; see `variable_exchange.VariableSink`."""
  return variable_exchange.VariableSink(
    address, _Transport(address), directory=directory, **kwargs
  )


def make_source(
  address: str, **kwargs: Any
) -> variable_exchange.VariableSource:
  """Where actors get variables; see `variable_exchange.VariableSource`."""
  return variable_exchange.VariableSource(
    address, _Transport(address), connection.HealthCheck(address), **kwargs
  )


class _Transport(variable_exchange.Transport):
  """See base class. A call that the server blocks ends with the process."""

  def __init__(self, address: str):
    self._address = address
    self._client = connection.connect(address)

  def insert(
    self, timesteps: Sequence[Sequence[np.ndarray]], version: int
  ) -> None:
    """See base class."""
    try:
      self._insert(tables.VARIABLES, timesteps, float(version))
      self._insert(
        tables.POLICY_VERSION, [[np.array(version, np.int64)]], float(version)
      )
    except connection.STATUS_ERRORS as e:
      raise self._unavailable(e) from e

  def state(self) -> tables.LimiterState:
    """See base class."""
    try:
      infos = connection.table_infos(self._client, _CONNECT_TIMEOUT_S)
      return table_info.limiter_state(infos[tables.VARIABLES])
    except (*connection.STATUS_ERRORS, KeyError) as e:
      raise self._unavailable(e) from e

  def fetch(self) -> list[np.ndarray]:
    """See base class."""
    try:
      sampler = self._client.NewSampler(tables.VARIABLES, 1, 1)
      columns = sampler.GetNextTrajectory()
    except connection.STATUS_ERRORS as e:
      raise self._unavailable(e) from e
    return columns[pybind.Sampler.NUM_INFO_TENSORS :]

  def close(self) -> None:
    """See base class: nothing interrupts a call of the C++ client."""

  def _insert(
    self, table: str, timesteps: Sequence[Sequence[np.ndarray]], priority: float
  ) -> None:
    """Inserts one item over a stream of its own, so that none is left open."""
    writer = self._client.NewWriter(
      chunk_length=1,
      max_timesteps=len(timesteps),
      delta_encoded=False,
      max_in_flight_items=1,
    )
    connection.keep_alive(writer)
    for columns in timesteps:
      writer.Append(list(columns))
    writer.CreateItem(table, len(timesteps), priority)
    writer.Flush()
    writer.Close(False)
    connection.let_go(writer)

  def _unavailable(self, error: Exception) -> errors.ReplayUnavailableError:
    self._client = connection.connect(self._address)
    return errors.ReplayUnavailableError(
      f'replay server {self._address} does not exchange variables: '
      f'{type(error).__name__}: {error}'
    )
