"""Variables over the wire; see `replay.variable_exchange`."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import pathlib
import secrets
import threading
from typing import Any

import grpc
import numpy as np

from tunix_reverb import errors
from tunix_reverb.replay import tables
from tunix_reverb.replay import variable_exchange
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import decoder as decoder_lib
from tunix_reverb.replay.wire_client import encoder as encoder_lib
from tunix_reverb.replay.wire_client import health
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.replay.wire_client import protocol

_ANSWER_TIMEOUT_S = 1.0
# For hundreds of megabytes over a slow network.
_TRANSFER_TIMEOUT_S = 120.0
# The table holds an item, as `state` said, unless it was reset since.
_EMPTY_TIMEOUT_MS = 1000

# ValueError is what gRPC raises on a channel that `close` closed.
_ERRORS = (connection.StatusError, ValueError)


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
    address, _Transport(address), health.HealthCheck(address), **kwargs
  )


class _Transport(variable_exchange.Transport):
  """See base class."""

  def __init__(self, address: str):
    self._address = address
    self._channel = connection.open_channel(address)
    self._encoder = encoder_lib.Encoder()
    self._decoder = decoder_lib.Decoder(whole_arrays=False)

  def insert(
    self, timesteps: Sequence[Sequence[np.ndarray]], version: int
  ) -> None:
    """See base class."""
    confirmed = threading.Event()
    awaited = {secrets.randbits(64), secrets.randbits(64)}

    def requests() -> Iterator[bytes]:
      yield from self._requests(timesteps, float(version), tuple(awaited))
      confirmed.wait(_TRANSFER_TIMEOUT_S)

    unconfirmed = set(awaited)
    try:
      stream = insert_stream.open_stream(
        self._channel, requests(), _TRANSFER_TIMEOUT_S
      )
      try:
        for response in stream:
          unconfirmed.difference_update(response.keys)
          if not unconfirmed:
            return
      finally:
        confirmed.set()
        stream.cancel()
    except _ERRORS as e:
      raise self._unavailable(e) from e
    raise errors.ReplayUnavailableError(
      f'replay server {self._address} ended the stream of variables'
    )

  def state(self) -> tables.LimiterState:
    """See base class."""
    try:
      return admin.limiter_state(self._channel, _ANSWER_TIMEOUT_S)[
        tables.VARIABLES
      ]
    except (KeyError, ValueError) as e:
      raise self._unavailable(e) from e

  def fetch(self) -> list[np.ndarray]:
    """See base class."""
    request = protocol.SampleStreamRequest(
      table=tables.VARIABLES, num_samples=1
    )
    request.rate_limiter_timeout.milliseconds = _EMPTY_TIMEOUT_MS
    splitter = decoder_lib.Splitter()
    try:
      stream = self._channel.stream_stream(
        connection.path('SampleStream'),
        request_serializer=protocol.SampleStreamRequest.SerializeToString,
      )(iter([request]), timeout=_TRANSFER_TIMEOUT_S)
      try:
        for response in stream:
          for item in splitter.split(response):
            return self._decoder.decode(item).columns
      finally:
        stream.cancel()
    except errors.PoisonItemError:
      raise
    except _ERRORS as e:
      raise self._unavailable(e) from e
    raise errors.ReplayUnavailableError(
      f'replay server {self._address} ended the stream of variables'
    )

  def close(self) -> None:
    """See base class."""
    self._channel.close()

  def _requests(
    self,
    timesteps: Sequence[Sequence[np.ndarray]],
    priority: float,
    keys: tuple[int, int],
  ) -> Iterator[bytes]:
    """A chunk per request, since one message holds 2 GiB at most.

    The last one brings the items as well, the variables before the version.
    """
    chunk_keys = [secrets.randbits(64) for _ in timesteps]
    item = protocol.PrioritizedItem(
      key=keys[0], table=tables.VARIABLES, priority=priority
    )
    for i in range(len(timesteps[0])):
      column = item.flat_trajectory.columns.add()
      for chunk_key in chunk_keys:
        column.chunk_slices.add(chunk_key=chunk_key, length=1, index=i)
    for i, (chunk_key, columns) in enumerate(zip(chunk_keys, timesteps), 1):
      rest = protocol.InsertStreamRequest(keep_chunk_keys=chunk_keys[:i])
      parts = self._encoder.encode(columns, (), chunk_key).parts
      if i == len(chunk_keys):
        rest = protocol.InsertStreamRequest(items=[item])
        parts += self._encoder.encode(
          [np.array(priority, np.int64)],
          [(tables.POLICY_VERSION, keys[1], priority)],
          secrets.randbits(64),
        ).parts
      # Serialised messages, one after the other, are one message of all.
      yield b''.join([rest.SerializeToString(), *parts])

  def _unavailable(self, error: Exception) -> errors.ReplayUnavailableError:
    text = (
      connection.status_text(error)
      if isinstance(error, grpc.RpcError)
      else str(error)
    )
    return errors.ReplayUnavailableError(
      f'replay server {self._address} does not exchange variables: {text}'
    )
