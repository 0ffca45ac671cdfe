"""Inserts into a replay server: the stream, and one request at a time.

The server confirms an item by its key as soon as it is in its table. A key that
is there already is assigned its priority anew and not stored twice, so that a
request whose fate is unknown may be sent again.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from collections.abc import Sequence
import secrets
import threading
from typing import Any
from typing import NamedTuple

import grpc
import numpy as np

from tunix_reverb import errors
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import encoder as encoder_lib
from tunix_reverb.replay.wire_client import protocol


class NewItem(NamedTuple):
  """Data to insert, and under which keys.

  Attributes:
    entries: (table, key, priority) of one or more items over the same data.
    columns: whole arrays; readers get them as they are.
  """

  entries: Sequence[tuple[str, int, float]]
  columns: Sequence[np.ndarray]


def draw_item_keys() -> Iterator[int]:
  """Distinct item keys of a writer: 32 bits of chance above 32 that count."""
  incarnation = secrets.randbits(32) << 32
  return iter(range(incarnation, 2**64))


def draw_chunk_keys() -> Iterator[int]:
  """Distinct chunk keys of a writer, told apart from its items' keys.

  A checkpoint knows chunks by their keys: two of the same key would become
  one. 64 bits of chance where to start leave that to no run.
  """
  start = secrets.randbits(64)
  return ((start + i) % 2**64 for i in range(2**64))


def open_stream(
  channel: grpc.Channel,
  requests: Iterator[bytes],
  timeout_s: float | None = None,
) -> Any:
  """Starts to insert; a thread of gRPC's draws from `requests`.

  The server forgets what is unconfirmed when `requests` ends, so they must not
  end before the last confirmation.

  Args:
    channel: from `connection.open_channel`.
    requests: serialised InsertStreamRequests.
    timeout_s: seconds until the stream is cancelled.

  Returns:
    An iterator of InsertStreamResponses, which raises
    `connection.StatusError`; its `cancel()` ends the stream at once.
  """
  return channel.stream_stream(
    connection.path('InsertStream'),
    response_deserializer=protocol.InsertStreamResponse.FromString,
  )(requests, timeout=timeout_s)


class Inserter:
  """Inserts items of any tables and columns, one request at a time.

  One thread at a time. Each call is a stream of its own, of which nothing is
  left when the call returns; for many items a second see `WireItemWriter`.
  """

  def __init__(self, address: str):
    """Args: address: 'host:port'. Connects when it is first used."""
    self._address = address
    self._channel = connection.open_channel(address)
    self._encoder = encoder_lib.Encoder()
    self._chunk_keys = draw_chunk_keys()

  def insert(self, items: Sequence[NewItem], timeout_s: float) -> None:
    """Inserts `items` and returns when the server has confirmed all of them.

    After an error, some of them may be in their tables; the same call may be
    repeated.

    Args:
      items: at least one.
      timeout_s: seconds that it may take.

    Raises:
      errors.DeadlineExceededError: not confirmed within `timeout_s`.
      errors.ReplayUnavailableError: the server is gone, or refuses.
      TypeError: a dtype that Reverb does not store.
      ValueError: a negative priority or NaN.
    """
    request, awaited = self._encode(items)
    confirmed = threading.Event()

    def requests() -> Iterator[bytes]:
      yield request
      confirmed.wait(timeout_s)

    stream = open_stream(self._channel, requests(), timeout_s)
    try:
      for response in stream:
        awaited.subtract(response.keys)
        awaited = +awaited
        if not awaited:
          return
      raise errors.ReplayUnavailableError(
        f'replay server {self._address} ended the stream with '
        f'{awaited.total()} item(s) unconfirmed'
      )
    except connection.StatusError as e:
      raise self._failure(e, timeout_s, awaited.total()) from e
    finally:
      confirmed.set()
      stream.cancel()

  def close(self) -> None:
    """Ends the connection; idempotent."""
    self._channel.close()

  def _encode(
    self, items: Sequence[NewItem]
  ) -> tuple[bytes, collections.Counter[int]]:
    """The request, and how many confirmations of each key to await."""
    parts: list = []
    awaited: collections.Counter[int] = collections.Counter()
    for item in items:
      encoded = self._encoder.encode(
        item.columns, item.entries, next(self._chunk_keys)
      )
      parts += encoded.parts
      awaited.update(int(key) for _, key, _ in item.entries)
    if not awaited:
      raise ValueError('items must hold at least one entry')
    return b''.join(parts), awaited

  def _failure(
    self, error: grpc.RpcError, timeout_s: float, unconfirmed: int
  ) -> Exception:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
      return errors.DeadlineExceededError(
        f'insert of {unconfirmed} item(s) waited for the confirmation of '
        f'replay server {self._address} for {timeout_s:g} s'
      )
    return errors.ReplayUnavailableError(
      f'replay server {self._address} did not take {unconfirmed} item(s): '
      f'{connection.status_text(error)}'
    )
