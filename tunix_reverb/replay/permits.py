"""Permits through a queue table: the learner puts them in, actors take them.

An item of the table is one permit: its key is the permit's id, its columns are
the id and the policy version, int64 []. Actors ask for as many as they can use
at once, so that none waits with one actor while another has none.
"""

from __future__ import annotations

from collections.abc import Sequence
import logging
import secrets
import threading

import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import entries
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.replay.wire_client import sample_stream
from tunix_reverb.staleness import bound as bound_lib

_CALL_TIMEOUT_S = 5.0
# How long an actor stands in line before it does so anew. An actor that is
# killed in line may be handed a permit until this is over.
_IN_LINE_S = 0.5
_REST_TIMEOUT_S = 0.05
# A permit that a busy server has handed out too late would be missed until its
# lease is over.
_GRACE_S = 30.0
_RETRY_S = 0.5
_JOIN_TIMEOUT_S = 2.0
_GIVE_BACK_TIMEOUT_S = 1.0


class WirePermitTable(core.PermitTable):
  """See base class. The table is on the first of several servers."""

  def __init__(self, addresses: Sequence[str]):
    """Args: addresses: 'host:port' of every replay server."""
    self._channels = [connection.open_channel(a) for a in addresses]
    self._inserter = insert_stream.Inserter(addresses[0])
    self._removed = [sample_stream.Puller(a, tables.REMOVED) for a in addresses]

  def reset(self) -> None:
    """See base class."""
    admin.reset(self._channels[0], tables.PERMITS, _CALL_TIMEOUT_S)

  def state(self) -> types.PermitTableState:
    """See base class."""
    info = admin.info(self._channels[0], _CALL_TIMEOUT_S)[tables.PERMITS]
    limiter = info.rate_limiter_info
    return types.PermitTableState(
      inserts=limiter.insert_stats.completed,
      samples=limiter.sample_stats.completed,
      size=info.current_size,
    )

  def insert(self, permits: Sequence[types.Permit]) -> None:
    """See base class."""
    items = [
      insert_stream.NewItem(
        [(tables.PERMITS, permit.permit_id, float(permit.policy_version))],
        [np.array(value, np.int64) for value in permit],
      )
      for permit in permits
    ]
    self._inserter.insert(items, _CALL_TIMEOUT_S)

  def delete(self, permit_ids: Sequence[int]) -> None:
    """See base class."""
    last_first = list(reversed(permit_ids))
    admin.delete_items(
      self._channels[0], tables.PERMITS, last_first, _CALL_TIMEOUT_S
    )

  def removals(self) -> list[types.Removal]:
    """See base class."""
    found = []
    for channel, puller in zip(self._channels, self._removed):
      info = admin.info(channel, _CALL_TIMEOUT_S)[tables.REMOVED]
      if info.current_size:
        for item in puller.pull(info.current_size, _CALL_TIMEOUT_S):
          found += _decode_removals(item)
    return found

  def close(self) -> None:
    """Ends the connections; idempotent."""
    for puller in self._removed:
      puller.close()
    self._inserter.close()
    for channel in self._channels:
      channel.close()


class WirePermitSource(core.PermitSource):
  """Takes permits in a daemon thread, as many as were requested."""

  def __init__(self, address: str):
    """Args: address: 'host:port' of the first replay server."""
    self._address = address
    self._puller = sample_stream.Puller(
      address, tables.PERMITS, grace_s=_GRACE_S
    )
    self._changed = threading.Condition()
    self._wanted = 0
    self._come: list[types.Permit] = []
    self._closed = False
    self._error: BaseException | None = None
    self._thread = threading.Thread(
      target=self._run, name=f'permits of {address}', daemon=True
    )
    self._thread.start()

  def request(self, count: int) -> None:
    """See base class."""
    with self._changed:
      self._wanted += count
      self._changed.notify_all()

  def take(self, timeout_s: float) -> list[types.Permit]:
    """See base class.

    Raises:
      RuntimeError: the thread failed; the cause is chained.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._come or self._closed or self._error, timeout_s
      )
      if self._error is not None:
        raise RuntimeError('taking permits failed') from self._error
      come, self._come = self._come, []
      return come

  def close(self, held: Sequence[int] = ()) -> None:
    """See base class."""
    with self._changed:
      if self._closed:
        return
      self._closed = True
      self._changed.notify_all()
    self._puller.close()
    self._thread.join(_JOIN_TIMEOUT_S)
    unused = [*held, *(permit.permit_id for permit in self._come)]
    if unused:
      self._give_back(unused)

  def _give_back(self, permit_ids: Sequence[int]) -> None:
    """Tells the learner; if that fails, their leases will run out."""
    removals = [
      entries.Removal(key=0, permit_id=i, length=0, cause=bound_lib.FRESH)
      for i in permit_ids
    ]
    entry = (tables.REMOVED, secrets.randbits(64), 0.0)
    inserter = insert_stream.Inserter(self._address)
    try:
      inserter.insert(
        [insert_stream.NewItem([entry], entries.encode_removals(removals))],
        _GIVE_BACK_TIMEOUT_S,
      )
    except (errors.DeadlineExceededError, errors.ReplayUnavailableError) as e:
      logging.warning(
        'permits: %d could not be given back: %s', len(permit_ids), e
      )
    finally:
      inserter.close()

  def _run(self) -> None:
    trouble = ''
    try:
      while self._wait_for_requests():
        try:
          self._pull()
          trouble = ''
        except errors.ReplayUnavailableError as e:
          if not trouble:  # Once for each outage.
            logging.warning('permits: %s; trying again', e)
          trouble = str(e)
          with self._changed:
            self._changed.wait_for(lambda: self._closed, _RETRY_S)
    except BaseException as e:  # Raised again in the actor's thread.
      with self._changed:
        self._error = e
        self._changed.notify_all()

  def _wait_for_requests(self) -> bool:
    with self._changed:
      self._changed.wait_for(lambda: self._wanted or self._closed)
      return not self._closed

  def _pull(self) -> None:
    """Waits for a permit, and takes what more there is with it."""
    items = self._puller.pull(1, _IN_LINE_S)
    self._hand_over(items)
    with self._changed:
      wanted = self._wanted
    more = min(wanted, *(item.table_size - 1 for item in items)) if items else 0
    if more > 0:
      self._hand_over(self._puller.pull(more, _REST_TIMEOUT_S))

  def _hand_over(self, items: Sequence[sample_stream.RawItem]) -> None:
    permits = [
      types.Permit(*(int(column) for column in item.columns)) for item in items
    ]
    with self._changed:
      self._wanted -= len(permits)
      self._come += permits
      self._changed.notify_all()


def _decode_removals(item: sample_stream.RawItem) -> list[types.Removal]:
  """What an item of the table of removals tells; nothing if it is malformed."""
  try:
    return [
      types.Removal(one.permit_id, one.length, one.cause)
      for one in entries.decode_removals(item.columns)
    ]
  except ValueError as e:
    logging.warning('table %s: item %d: %s', tables.REMOVED, item.key, e)
    return []
