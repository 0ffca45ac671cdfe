"""One server that a sampler reads: its stream, its credits, its restarts."""

from __future__ import annotations

import collections
import logging
import threading
import time

from tunix_reverb import errors
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import decoder as decoder_lib
from tunix_reverb.replay.wire_client import health
from tunix_reverb.replay.wire_client import protocol
from tunix_reverb.replay.wire_client import recent_keys
from tunix_reverb.replay.wire_client import sample_stream

_CONNECT_TIMEOUT_S = 1.0
_DELETE_TIMEOUT_S = 5.0
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0

# A limiter that gives nothing for so long ends the stream, and the next stream
# takes over. It bounds how long a table goes on to serve a reader that is gone.
_REQUEST_TIMEOUT_S = 5.0

# Silence of a stream that owes items, or the news that there are none, after
# which its connection is taken for dead. A large item may travel that long.
_STALLED_S = 60.0

_MAX_RECENT_KEYS = 1 << 17


class Shard:
  """Keeps `window` items of a table sampled, or asked for, and not yet taken.

  A daemon thread reads. Every method but `close` is called with the lock of
  `ready` held.
  """

  def __init__(
    self, address: str, table: str, window: int, ready: threading.Condition
  ):
    """Starts reading.

    Args:
      address: 'host:port'.
      table: its name.
      window: credits: most items sampled, or asked for, and not yet taken.
      ready: notified when items have come.
    """
    self.address = address
    self.broken_streams = 0
    self.health = health.HealthCheck(address)
    self._table = table
    self._window = window
    self._ready = ready
    self._channel = connection.open_channel(address)
    self._stream: sample_stream.SampleStream | None = None
    self._items: collections.deque[decoder_lib.EncodedItem] = (
      collections.deque()
    )
    self._owed = 0  # Asked for and not received.
    self._idle = True  # No item has come since the stream began.
    self._moved_at_s = time.monotonic()
    self._samples_once = False
    self._recent = recent_keys.RecentKeys(_MAX_RECENT_KEYS)
    self._backoff_s = _MIN_BACKOFF_S
    self._closed = False
    self._wake = threading.Event()
    threading.Thread(
      target=self._run, daemon=True, name=f'sampler of {address}'
    ).start()

  def take(self) -> decoder_lib.EncodedItem | None:
    """The oldest item received, or None; asks for more in lots."""
    if not self._items:
      return None
    item = self._items.popleft()
    self._ask()
    return item

  def is_duplicate(self, key: int) -> bool:
    """Whether a queue has delivered this item before; remembers it."""
    return self._samples_once and not self._recent.add(key)

  def delete_if_it_stays(self, key: int) -> None:
    """Deletes an item that sampling has not removed; does not wait for it.

    If that fails the item will be sampled, and deleted, once more.
    """
    if self._samples_once:
      return
    self._channel.unary_unary(
      connection.path('MutatePriorities'),
      request_serializer=protocol.MutatePrioritiesRequest.SerializeToString,
    ).future(
      protocol.MutatePrioritiesRequest(table=self._table, delete_keys=[key]),
      timeout=_DELETE_TIMEOUT_S,
    )

  def restart_if_stalled(self) -> None:
    """Gives a stream up whose other end must be gone without a word."""
    silent_s = time.monotonic() - self._moved_at_s
    if self._stream is not None and self._owed and silent_s > _STALLED_S:
      self._moved_at_s = time.monotonic()
      self._stream.cancel()

  def close(self) -> list[decoder_lib.EncodedItem]:
    """Ends the stream and the thread; returns what was received."""
    self.health.close()
    with self._ready:
      self._closed = True
      items = list(self._items)
      self._items.clear()
      stream = self._stream
    self._wake.set()
    if stream is not None:
      stream.cancel()
    self._channel.close()
    return items

  def _run(self) -> None:
    while not self._closed:
      try:
        self._connect()
        while not self._closed:
          self._read_stream()
      except errors.ReplayUnavailableError as e:
        if self._closed:
          return
        self.broken_streams += 1
        logging.info('sampler of %s reconnects: %s', self.address, e)
        self._wake.wait(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
      except ValueError:
        # What gRPC says of a channel that is closed.
        if not self._closed:
          raise

  def _connect(self) -> None:
    """Makes sure that the server is there, and what kind of table it has."""
    infos = admin.info(self._channel, _CONNECT_TIMEOUT_S)
    if self._table not in infos:
      raise errors.ReplayUnavailableError(
        f'it must serve a table {self._table!r} and serves '
        f'{", ".join(sorted(infos))}'
      )
    self._samples_once = infos[self._table].max_times_sampled == 1

  def _read_stream(self) -> None:
    """Receives items until the stream ends because the table is empty.

    Raises:
      errors.ReplayUnavailableError: it ends for another reason.
    """
    stream = sample_stream.SampleStream(self._channel, self._table)
    try:
      with self._ready:
        self._stream = stream
        self._idle = True
        self._ask()
      while not self._closed:
        self._receive(stream.read())
    except errors.DeadlineExceededError:
      self.health.heard()
    finally:
      with self._ready:
        self._stream = None
        self._owed = 0
      stream.cancel()

  def _receive(self, items: list[decoder_lib.EncodedItem]) -> None:
    self.health.heard()
    self._backoff_s = _MIN_BACKOFF_S
    with self._ready:
      if self._closed:
        return  # `close` has given back what there was.
      self._moved_at_s = time.monotonic()
      self._owed -= len(items)
      self._items.extend(items)
      self._ready.notify(len(items))
      if self._idle:
        self._idle = False
        self._ask()

  def _ask(self) -> None:
    """Asks for as many as the window has room for, if that is half of it.

    A request that times out loses what comes in that very moment if it is for
    several items; so one that may well wait for long is for a single one.
    """
    room = self._window - self._owed - len(self._items)
    if self._idle:
      room = min(room, 1 - self._owed)
    elif room < (self._window + 1) // 2:
      room = 0
    if self._stream is None or room <= 0:
      return
    if not self._owed:
      self._moved_at_s = time.monotonic()
    self._owed += room
    self._stream.request(room, _REQUEST_TIMEOUT_S)
