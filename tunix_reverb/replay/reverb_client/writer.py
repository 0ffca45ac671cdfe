"""Writes items through Reverb's legacy C++ writer, never waiting without end.

Why the legacy writer: it takes whole arrays whose length differs from item to
item; the newer TrajectoryWriter fixes a column's shape at its first append.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import Any

from reverb import pybind

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import table_info
from tunix_reverb.replay import tables
from tunix_reverb.replay.reverb_client import connection

_CONNECT_TIMEOUT_S = 1
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0


class OfficialItemWriter(core.ItemWriter):
  """Inserts items into one table of one server.

  A daemon thread owns the C++ writer. `write` hands items to it through a
  queue of `max_pending_items`, where an item stays until the server confirms
  that it is in the table; the table's rate limiter is felt as soon as that
  queue is full. (The server itself takes in some more that it has no room
  for: a tenth of the table's size and one item of each writer.)

  When the connection breaks, items not yet confirmed are sent again over a new
  one. Those of them that had arrived are then in the table twice, which
  `resent_items` bounds from above; a killed server has lost what it did not
  checkpoint, confirmed or not.

  Args:
    address: 'host:port' of the server.
    columns: `Trajectories` of `ColumnSpec`, the table's signature.
    table: the table's name.
    max_pending_items: most items handed over and not yet confirmed.
    default_timeout_s: for `write` calls that name none.
    unavailable_timeout_s: seconds without an answer from the server after
      which the writer has failed for good.
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
  ):
    """Starts the writer; returns at once, whether the server is up or not."""
    if max_pending_items < 1:
      raise ValueError(f'max_pending_items ({max_pending_items}) must be >= 1')
    self._address = address
    self._table = table
    self._codec = columns_lib.ColumnCodec(columns)
    self._max_pending_items = max_pending_items
    self._default_timeout_s = default_timeout_s
    self._unavailable_timeout_s = unavailable_timeout_s
    self._changed = threading.Condition()
    self._pending: collections.deque[tuple[list[Any], float]] = (
      collections.deque()
    )
    self._closing = False
    self._abandoned = False
    self._error: Exception | None = None
    self._blocked_s = 0.0
    self._confirmed_items = 0
    self._resent_items = 0
    self._unsure_items = 0  # Sent over a stream and not confirmed on it.
    self._health = connection.HealthCheck(address)
    self._thread = threading.Thread(
      target=self._run, daemon=True, name=f'writer to {address}'
    )
    self._thread.start()

  @property
  def confirmed_items(self) -> int:
    """Items that the server confirmed."""
    return self._confirmed_items

  @property
  def unconfirmed_items(self) -> int:
    """Items taken over and not confirmed; after `close`, what may be lost."""
    return len(self._pending)

  @property
  def resent_items(self) -> int:
    """Items sent again after a lost connection; each may be there twice."""
    return self._resent_items

  def write(
    self, trajectories: types.Trajectories, timeout_s: float | None = None
  ) -> bool:
    """See `core.ItemWriter`; the arrays must not change after it.

    Raises:
      ValueError: a negative `policy_version`, or lengths that contradict the
        columns.
    """
    arrays = self._codec.flatten(trajectories)
    problem = columns_lib.inconsistency(trajectories)
    if problem:
      raise ValueError(f"the item's columns must agree: {problem}")
    priority = columns_lib.priority(trajectories)
    if timeout_s is None:
      timeout_s = self._default_timeout_s
    start_s = time.monotonic()
    deadline_s = start_s + timeout_s
    with self._changed:
      self._raise_if_failed()
      if len(self._pending) >= self._max_pending_items:
        self._wait_for_room(deadline_s)
        self._blocked_s += time.monotonic() - start_s
        if len(self._pending) >= self._max_pending_items:
          return False
      self._pending.append((arrays, priority))
      self._changed.notify_all()
    return True

  def blocked_s(self) -> float:
    """Seconds that `write` has spent waiting for room, in total."""
    return self._blocked_s

  def close(self, timeout_s: float) -> bool:
    """Sends what was taken over. Returns whether all of it was confirmed.

    What is still blocked at the deadline stays with a daemon thread, which
    the end of the process takes along.
    """
    with self._changed:
      self._closing = True
      self._changed.notify_all()
    self._thread.join(max(timeout_s, 0.0))
    with self._changed:
      self._abandoned = True
      self._changed.notify_all()
    self._health.close()
    left = len(self._pending)
    if left:
      logging.warning(
        'writer to %s closed with %d item(s) unconfirmed', self._address, left
      )
    return left == 0

  def _wait_for_room(self, deadline_s: float) -> None:
    """Waits, with the lock held, until there is room or the deadline."""
    while len(self._pending) >= self._max_pending_items:
      remaining_s = deadline_s - time.monotonic()
      if remaining_s <= 0:
        return
      self._changed.wait(min(remaining_s, 0.5))
      self._raise_if_failed()

  def _raise_if_failed(self) -> None:
    if self._closing:
      raise RuntimeError('write must not be called after close')
    silent_s = self._health.silent_s()
    if self._error is None and silent_s > self._unavailable_timeout_s:
      self._error = errors.ReplayUnavailableError(
        f'replay server {self._address} has not answered for {silent_s:.0f} s '
        f'(unavailable_timeout_s is {self._unavailable_timeout_s:g}); '
        f'{len(self._pending)} item(s) are unconfirmed'
      )
    if self._error is not None:
      raise self._error

  def _run(self) -> None:
    """Sends what is pending; the only user of the C++ writer."""
    writer: pybind.Writer | None = None
    backoff_s = _MIN_BACKOFF_S
    while batch := self._next_batch():
      try:
        if writer is None:
          writer = self._open()
          self._resent_items += self._unsure_items
        self._send(writer, batch)
        backoff_s = _MIN_BACKOFF_S
      except errors.SpecMismatchError as e:
        self._fail(e)
        return
      except (TypeError, ValueError) as e:
        self._fail(_refused(self._table, self._address, e))
        return
      except (RuntimeError, IndexError) as e:
        # The old writer is unusable, and destroying it would abort.
        writer = None
        logging.info('writer to %s reconnects: %s', self._address, e)
        with self._changed:
          self._changed.wait_for(lambda: self._abandoned, backoff_s)
        backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
    if writer is not None:
      writer.Close(False)
      connection.let_go(writer)

  def _next_batch(self) -> list[tuple[list[Any], float]]:
    """Waits for pending items; none once closed and sent, or given up."""
    with self._changed:
      self._changed.wait_for(lambda: self._pending or self._closing)
      return [] if self._abandoned else list(self._pending)

  def _open(self) -> pybind.Writer:
    client = connection.connect(self._address)
    infos = connection.table_infos(client, _CONNECT_TIMEOUT_S)
    if self._table not in infos:
      raise table_info.missing_table(self._address, self._table, infos)
    writer = client.NewWriter(
      chunk_length=1,
      max_timesteps=1,
      delta_encoded=False,
      max_in_flight_items=self._max_pending_items,
    )
    connection.keep_alive(writer)
    self._health.heard()
    return writer

  def _send(
    self, writer: pybind.Writer, batch: list[tuple[list[Any], float]]
  ) -> None:
    self._unsure_items = len(batch)
    for arrays, priority in batch:
      writer.Append(arrays)
      writer.CreateItem(self._table, 1, priority)
    writer.Flush()
    self._health.heard()
    with self._changed:
      for _ in batch:
        self._pending.popleft()
      self._confirmed_items += len(batch)
      self._unsure_items = 0
      self._changed.notify_all()

  def _fail(self, error: Exception) -> None:
    with self._changed:
      self._error = error
      self._changed.notify_all()


def _refused(table: str, address: str, cause: Exception) -> Exception:
  error = errors.SpecMismatchError(
    f'table {table!r} of replay server {address} refuses the item: {cause}'
  )
  error.__cause__ = cause
  return error
