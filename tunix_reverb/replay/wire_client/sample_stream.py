"""Samples from a replay server: the stream, and a few items at a time.

What the server does (0.14): it serves the requests of a stream one after the
other, and looks at the next one only when it has sampled all that the one
before asked for. A request may ask for 2^31 - 1 samples; more would stall it.
What has been sampled is sent at once, in responses of up to about 2 MB. A
request that the limiter keeps waiting beyond its timeout ends the stream.

A stream that is cancelled leaves its request in the table's line: until it
times out, the table goes on to hand it items, which nobody gets. So every
request here has a timeout.
"""

from __future__ import annotations

import collections
import functools
import queue
import threading
import time

import grpc
import numpy as np

from tunix_reverb import errors
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import decoder as decoder_lib
from tunix_reverb.replay.wire_client import protocol

RawItem = decoder_lib.RawItem

_MAX_SAMPLES_PER_REQUEST = 2**31 - 1

# How long the news that a request has timed out may take to arrive.
_GRACE_S = 1.0

# Samples that `pull` asks for one by one: none is lost as the time is over.
_MAX_SINGLE = 64

_MAX_POISON_KEYS = 1000

# The largest block that glibc may learn to keep, but for its own overhead.
_LARGEST_KEPT_BYTES = (32 << 20) - (1 << 16)


class SampleStream:
  """One SampleStream call: requests go in, encoded items come out."""

  def __init__(self, channel: grpc.Channel, table: str):
    """Args: channel: of `connection.open_channel`. table: to sample from."""
    _keep_freed_memory()
    self._table = table
    self._requests: queue.SimpleQueue = queue.SimpleQueue()
    self._splitter = decoder_lib.Splitter()
    self._call = channel.stream_stream(
      connection.path('SampleStream'),
      request_serializer=protocol.SampleStreamRequest.SerializeToString,
    )(iter(self._requests.get, None))

  def request(self, num_samples: int, timeout_s: float) -> None:
    """Asks for more.

    A request that times out while it is half fulfilled loses what it has; one
    for a single sample cannot.

    Args:
      num_samples: 1 to 2^31 - 1.
      timeout_s: seconds that the limiter may keep this request waiting, from
        one sample to the next; at least a millisecond.
    """
    request = protocol.SampleStreamRequest(
      table=self._table, num_samples=min(num_samples, _MAX_SAMPLES_PER_REQUEST)
    )
    request.rate_limiter_timeout.milliseconds = max(1, int(1000 * timeout_s))
    self._requests.put(request)

  def read(self) -> list[decoder_lib.EncodedItem]:
    """Waits for the next response; the items that end in it.

    Raises:
      errors.DeadlineExceededError: the stream has ended, because the limiter
        kept a request waiting for too long.
      errors.ReplayUnavailableError: it has ended for another reason.
    """
    try:
      return self._splitter.split(next(self._call))
    except connection.StatusError as e:
      if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise errors.DeadlineExceededError(connection.status_text(e)) from e
      raise errors.ReplayUnavailableError(connection.status_text(e)) from e
    except (StopIteration, errors.PoisonItemError) as e:
      raise errors.ReplayUnavailableError(f'the stream ended early: {e}') from e

  def cancel(self) -> None:
    """Ends the stream, from any thread; idempotent."""
    self._call.cancel()
    self._requests.put(None)


@functools.cache
def _keep_freed_memory() -> None:
  """Keeps the memory of a response that is done with for the next one.

  glibc hands freed blocks back to the system, to be mapped and zeroed again,
  if they are larger than any that it has seen freed. At 1 MB an item that was
  a third of a reader's CPU time. It has seen one now; nothing is touched.
  """
  np.empty(_LARGEST_KEPT_BYTES, np.uint8)


class Puller:
  """Takes a few items out of a table, and asks for none that it cannot use.

  `poison` are the keys of items that could not be read and were skipped; the
  newest thousand.
  """

  def __init__(self, address: str, table: str, *, grace_s: float = _GRACE_S):
    """Connects when it is first used.

    Args:
      address: 'host:port'.
      table: its name.
      grace_s: seconds that the news of a timeout may take to arrive; what the
        server does not tell by then is lost.
    """
    self._grace_s = grace_s
    self.poison: collections.deque[int | None] = collections.deque(
      maxlen=_MAX_POISON_KEYS
    )
    self._address = address
    self._table = table
    self._channel = connection.open_channel(address)
    self._decoder = decoder_lib.Decoder()
    self._closed = False
    self._stream: SampleStream | None = None
    self._inbox: queue.SimpleQueue = queue.SimpleQueue()

  def pull(self, count: int, timeout_s: float) -> list[RawItem]:
    """Samples `count` items, or as many as come in time.

    What has not come by then stays in the table. The exception: when the
    server does not tell within `grace_s` more that the time is over, what it
    has taken out of the table by then (up to `count` items) is lost.

    One thread at a time; `close` may come from any.

    Args:
      count: at least 1. Ask for more than 64 only as the sole reader of a
        table: if another one takes some of them, what comes in the very moment
        of the timeout can be lost.
      timeout_s: seconds to wait; at least a millisecond.

    Returns:
      The items that came, without those that cannot be read; none after
      `close`.

    Raises:
      errors.ReplayUnavailableError: the server cannot be reached or refuses,
        and no item came.
    """
    deadline_s = time.monotonic() + timeout_s
    items: list[RawItem] = []
    received, owed, available = 0, 0, 1
    while received < count and not self._closed:
      if not owed:
        remaining_s = deadline_s - time.monotonic()
        if received and remaining_s <= 0:
          break
        owed = min(available, count - received)
        self._request(owed, remaining_s)
      try:
        remaining_s = max(0.0, deadline_s - time.monotonic())
        encoded = self._receive(remaining_s + self._grace_s)
      except errors.DeadlineExceededError:
        self._end_stream()
        break
      except errors.ReplayUnavailableError as e:
        self._end_stream()
        if items or self._closed:
          break
        raise errors.ReplayUnavailableError(
          f'replay server {self._address} gives no samples of table '
          f'{self._table!r}: {e}'
        ) from e
      received += len(encoded)
      owed -= len(encoded)
      items += self._decode(encoded)
      available = max(1, items[-1].table_size - 1 if items else 1)
    return items

  def close(self) -> None:
    """Ends a `pull` under way, and the connection; idempotent."""
    self._closed = True
    self._inbox.put(errors.ReplayUnavailableError('the puller was closed'))
    self._channel.close()

  def _request(self, count: int, timeout_s: float) -> None:
    if self._stream is None:
      self._inbox = queue.SimpleQueue()
      self._stream = SampleStream(self._channel, self._table)
      threading.Thread(
        target=_pump,
        args=(self._stream, self._inbox),
        daemon=True,
        name=f'puller of {self._table} of {self._address}',
      ).start()
    if count > _MAX_SINGLE:
      self._stream.request(count, timeout_s)
    else:
      for _ in range(count):
        self._stream.request(1, timeout_s)

  def _receive(self, timeout_s: float) -> list[decoder_lib.EncodedItem]:
    try:
      received = self._inbox.get(timeout=timeout_s)
    except queue.Empty:
      raise errors.ReplayUnavailableError('it does not answer') from None
    if isinstance(received, Exception):
      raise received
    return received

  def _decode(self, encoded: list[decoder_lib.EncodedItem]) -> list[RawItem]:
    items = []
    for one in encoded:
      try:
        items.append(self._decoder.decode(one))
      except errors.PoisonItemError as e:
        self.poison.append(e.key)
    return items

  def _end_stream(self) -> None:
    stream, self._stream = self._stream, None
    if stream is not None:
      stream.cancel()


def _pump(stream: SampleStream, inbox: queue.SimpleQueue) -> None:
  """Moves what comes, and at last why no more comes, into `inbox`."""
  try:
    while True:
      inbox.put(stream.read())
  except (errors.DeadlineExceededError, errors.ReplayUnavailableError) as e:
    inbox.put(e)
