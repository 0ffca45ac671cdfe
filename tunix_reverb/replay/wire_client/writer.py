"""Writes items over the wire: pipelined, many in a request, to a deadline."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import logging
import threading
import time
from typing import Any

import grpc

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.replay import table_info
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import backpressure
from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.replay.wire_client import item_encoder
from tunix_reverb.replay.wire_client import protocol
from tunix_reverb.replay.wire_client import window as window_lib

_CONNECT_TIMEOUT_S = 1.0
# Enough to let another thread of the interpreter run.
_YIELD_S = 1e-6

_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_JOIN_TIMEOUT_S = 1.0

# Without a confirmation for so long, and with a limiter that would take the
# items, the stream is taken for dead and a new one opened; the next time it
# takes twice as long, for it may just be slow.
_STALLED_S = 10.0

# What a server says that goes away or comes back. Anything else is a refusal.
_TRANSIENT = (
  grpc.StatusCode.ABORTED,
  grpc.StatusCode.CANCELLED,
  grpc.StatusCode.DEADLINE_EXCEEDED,
  grpc.StatusCode.INTERNAL,
  grpc.StatusCode.UNAVAILABLE,
  grpc.StatusCode.UNKNOWN,
)


class WireItemWriter(core.ItemWriter):
  """Inserts items into one table of one server.

  `write` encodes an item and adds it to a window of `max_pending_items`, where
  it stays until the server confirms that it is in the table; the table's rate
  limiter is felt as soon as the window is full. (The server itself takes in
  some more that it has no room for: a tenth of the table's size and one request
  of each writer.)

  A daemon thread holds the stream. When it breaks, what is unconfirmed is sent
  again over a new one under the same keys, which the server does not store
  twice while they are in the table. In a table whose items leave when they are
  sampled, one that was sampled before its confirmation was lost comes again,
  with the same key; `resent_items` bounds these from above. A server that was
  restarted has lost what it did not checkpoint, but for what it confirmed in
  its last second: that is sent again as well.

  Args:
    address: 'host:port' of the server.
    columns: `Trajectories` of `ColumnSpec`, the table's signature.
    table: the table's name.
    max_pending_items: most items handed over and not yet confirmed. What is
      pending when a request goes, goes with it, up to 64 items or 1 MiB:
      a window of 128 gives the highest throughput.
    default_timeout_s: for `write` calls that name none.
    unavailable_timeout_s: seconds without an answer from the server after
      which the writer has failed for good.
    announce: also insert an `entries.Entry` of each item into `tables.INDEX`
      and `tables.ANNOUNCEMENTS`, as a table balanced by permits needs it; each
      item must then be under one permit, its first trajectory's.
  """

  def __init__(
    self,
    address: str,
    *,
    columns: types.Trajectories,
    table: str = tables.TRAJECTORIES,
    max_pending_items: int = 2,
    default_timeout_s: float = 1.0,
    unavailable_timeout_s: float = 120.0,
    announce: bool = False,
  ):
    """Starts the writer; returns at once, whether the server is up or not."""
    if max_pending_items < 1:
      raise ValueError(f'max_pending_items ({max_pending_items}) must be >= 1')
    self._address = address
    entry_tables = (tables.INDEX, tables.ANNOUNCEMENTS) if announce else ()
    self._tables = (*entry_tables, table)
    self._signature = _stored_signature(columns)
    self._encoder = item_encoder.ItemEncoder(columns, table, entry_tables)
    self._default_timeout_s = default_timeout_s
    self._unavailable_timeout_s = unavailable_timeout_s
    lock = threading.Lock()
    # Both guard what follows. The first wakes `write` and `close`, the second
    # the threads that send.
    self._changed = threading.Condition(lock)
    self._work = threading.Condition(lock)
    self._window = window_lib.Window(max_pending_items)
    self._stream: Any = None
    self._moved_at_s = 0.0  # When the window last lost an item or was empty.
    self._stall_s = _STALLED_S
    self._last_key: int | None = None
    self._closing = False
    self._abandoned = False
    self._error: Exception | None = None
    self._back_pressure = backpressure.BackPressure(
      address, table, self._renew_if_stalled
    )
    self._thread = threading.Thread(
      target=self._run, daemon=True, name=f'writer to {address}'
    )
    self._thread.start()

  @property
  def last_key(self) -> int | None:
    """The key of the item that `write` took over last."""
    return self._last_key

  @property
  def confirmed_items(self) -> int:
    """Items that the server confirmed."""
    return self._window.confirmed

  @property
  def unconfirmed_items(self) -> int:
    """Items taken over and not confirmed; after `close`, what may be lost."""
    return len(self._window)

  @property
  def resent_items(self) -> int:
    """Items sent again after a lost connection, under the same keys."""
    return self._window.resent

  def write(
    self, trajectories: types.Trajectories, timeout_s: float | None = None
  ) -> bool:
    """See `core.ItemWriter`; the arrays must not change after it.

    Raises:
      ValueError: a negative `policy_version`, or lengths that contradict the
        columns.
    """
    key, encoded = self._encoder.encode(trajectories)
    if timeout_s is None:
      timeout_s = self._default_timeout_s
    with self._changed:
      self._raise_if_failed()
      if self._window.full and not self._wait_for_room(timeout_s):
        return False
      if not len(self._window):
        self._moved_at_s = time.monotonic()
      fills_a_request = self._window.add(key, encoded, len(self._tables))
      self._last_key = key
      self._work.notify_all()
    if fills_a_request:
      # Else a caller that never waits would keep the interpreter from gRPC's
      # thread for 5 ms, while the server waits.
      time.sleep(_YIELD_S)
    return True

  def blocked_s(self) -> float:
    """Seconds that `write` has spent waiting for room, in total."""
    return self._back_pressure.blocked_s

  def blocked_by_limiter_s(self) -> float:
    """Those of `blocked_s` in which the table's rate limiter was to blame."""
    return self._back_pressure.limiter_s

  def blocked_by_network_s(self) -> float:
    """See `core.ItemWriter`.

    What `blocked_s` has more than both was spent in the last second and is not
    told apart yet.
    """
    return self._back_pressure.network_s

  def close(self, timeout_s: float) -> bool:
    """Sends what was taken over. Returns whether all of it was confirmed."""
    with self._changed:
      self._closing = True
      self._changed.wait_for(
        lambda: self._error or not len(self._window), max(timeout_s, 0.0)
      )
      self._abandoned = True
      left, stream = len(self._window), self._stream
      self._changed.notify_all()
      self._work.notify_all()
    if stream is not None:
      stream.cancel()
    self._back_pressure.close()
    self._thread.join(_JOIN_TIMEOUT_S)
    if left:
      logging.warning(
        'writer to %s closed with %d item(s) unconfirmed', self._address, left
      )
    return left == 0

  def _wait_for_room(self, timeout_s: float) -> bool:
    """Waits, with the lock held; whether there is room by the deadline."""
    start_s = time.monotonic()
    deadline_s = start_s + timeout_s
    while self._window.full:
      if start_s >= deadline_s:
        return False
      self._changed.wait(min(deadline_s - start_s, 0.5))
      now_s = time.monotonic()
      self._back_pressure.add(now_s - start_s)
      start_s = now_s
      self._raise_if_failed()
    return True

  def _raise_if_failed(self) -> None:
    if self._closing:
      raise RuntimeError('write must not be called after close')
    silent_s = self._back_pressure.silent_s()
    if self._error is None and silent_s > self._unavailable_timeout_s:
      self._error = errors.ReplayUnavailableError(
        f'replay server {self._address} has not answered for {silent_s:.0f} s '
        f'(unavailable_timeout_s is {self._unavailable_timeout_s:g}); '
        f'{len(self._window)} item(s) are unconfirmed'
      )
    if self._error is not None:
      raise self._error

  def _run(self) -> None:
    """Holds one stream after another while there is something to send."""
    server_id = None
    backoff_s = _MIN_BACKOFF_S
    while self._await_items():
      confirmed = self._window.confirmed
      try:
        with contextlib.closing(connection.open_channel(self._address)) as c:
          last_id, server_id = server_id, self._check_server(c)
          self._converse(c, last_id == server_id)
        problem = 'the server ended the stream'
      except errors.SpecMismatchError as e:
        self._fail(e)
        return
      except connection.StatusError as e:
        problem = connection.status_text(e)
        if e.code() not in _TRANSIENT:
          self._fail(self._refused(problem))
          return
      if self._abandoned:
        return
      logging.info('writer to %s reconnects: %s', self._address, problem)
      if self._window.confirmed > confirmed:
        backoff_s = _MIN_BACKOFF_S
      with self._work:
        self._work.wait_for(lambda: self._abandoned, backoff_s)
      backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

  def _await_items(self) -> bool:
    """Waits for items to send; False once closed."""
    with self._work:
      self._work.wait_for(
        lambda: not self._window.is_settled or self._abandoned
      )
      return not self._abandoned

  def _check_server(self, channel: grpc.Channel) -> tuple[int, int]:
    """Makes sure that the server takes our items; returns which start it is.

    Raises:
      errors.SpecMismatchError: it does not.
      connection.StatusError: it did not answer.
    """
    response = connection.call(
      channel, 'ServerInfo', protocol.ServerInfoRequest(), _CONNECT_TIMEOUT_S
    )
    self._back_pressure.heard()
    served = {info.name: info for info in response.table_info}
    for name in self._tables:
      if name not in served:
        raise table_info.missing_table(self._address, name, served)
    signature = table_info.signature(served[self._tables[-1]])
    lines = specs.differences(self._signature, signature) if signature else []
    if lines:
      raise self._refused('; '.join(lines))
    return response.tables_state_id.high, response.tables_state_id.low

  def _converse(self, channel: grpc.Channel, same_server: bool) -> None:
    """Sends items and notes confirmations until the stream ends."""
    with self._work:
      self._window.send_again(same_server)
      self._moved_at_s = time.monotonic()
      ended = threading.Event()
    stream = insert_stream.open_stream(channel, self._requests(ended))
    try:
      with self._work:
        self._stream = stream
        if self._abandoned:
          return
      for response in stream:
        self._back_pressure.heard()
        with self._changed:
          self._window.confirm(response.keys)
          self._moved_at_s = time.monotonic()
          self._stall_s = _STALLED_S
          if self._window.has_room:
            self._changed.notify_all()
    finally:
      with self._work:
        self._stream = None
        self._window.end_stream()
        ended.set()
        self._work.notify_all()
      stream.cancel()

  def _requests(self, ended: threading.Event) -> Iterator[bytes]:
    """What gRPC's thread sends on one stream."""
    while True:
      with self._work:
        self._work.wait_for(lambda: self._window.has_unsent or ended.is_set())
        if ended.is_set():
          return
        parts = self._window.take()
      yield b''.join(parts) if len(parts) > 1 else parts[0]

  def _renew_if_stalled(self, limited: bool | None) -> None:
    """Ends a stream that nothing comes back on, though it should."""
    with self._work:
      stream, stalled_s = self._stream, time.monotonic() - self._moved_at_s
      if stream is None or not len(self._window) or limited:
        return
      if stalled_s < self._stall_s:
        return
      self._stall_s *= 2
    logging.warning(
      'writer to %s: nothing was confirmed for %.0f s', self._address, stalled_s
    )
    stream.cancel()

  def _refused(self, why: str) -> errors.SpecMismatchError:
    return errors.SpecMismatchError(
      f'table {self._tables[-1]!r} of replay server {self._address} refuses '
      f'the item: {why}'
    )

  def _fail(self, error: Exception) -> None:
    with self._changed:
      self._error = error
      self._changed.notify_all()


def _stored_signature(
  columns: types.Trajectories,
) -> dict[str, specs.ColumnSpec]:
  """What the table's signature has for these columns."""
  return {
    path: specs.ColumnSpec(spec.shape, codec.stored_dtype(spec.dtype))
    for path, spec in specs.flatten_columns(columns).items()
  }
