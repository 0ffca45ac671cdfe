"""The items that a writer has taken over and the server has not confirmed."""

from __future__ import annotations

import collections
from collections.abc import Iterable
import time

from tunix_reverb.replay.wire_client import encoder

# What is pending goes at once, up to so much in one request. The cost of a
# request is that of a few small items.
_MAX_REQUEST_ITEMS = 64
_MAX_REQUEST_BYTES = 2**20

# A server that stops confirms what it had no room for, and breaks its streams
# at once: what it confirmed so shortly before is not to be believed if it comes
# back anew.
_DOUBTFUL_S = 1.0


class _Item:
  """One key: its bytes, and how far it has come."""

  __slots__ = ('awaited', 'copies', 'encoded', 'key', 'sent')

  def __init__(self, key: int, encoded: list[encoder.Encoded], copies: int):
    self.key = key
    self.encoded = encoded
    self.copies = copies
    self.awaited = copies
    self.sent = False


class Window:
  """Items in order: waiting to be sent, then to be confirmed. No lock.

  Args:
    max_items: most items taken over and not confirmed.

  Attributes:
    confirmed: items that the server confirmed.
    resent: items sent more than once.
  """

  def __init__(self, max_items: int):
    self.confirmed = 0
    self.resent = 0
    self._max_items = max_items
    self._unconfirmed: dict[int, _Item] = {}
    self._unsent: collections.deque[_Item] = collections.deque()
    # Added since a request was filled the last time.
    self._new_items = self._new_bytes = 0
    # With the time of confirmation; at most `max_items` of them.
    self._doubtful: collections.deque[tuple[float, _Item]] = collections.deque(
      maxlen=max_items
    )

  def __len__(self) -> int:
    return len(self._unconfirmed)

  @property
  def full(self) -> bool:
    """Whether `add` must wait."""
    return len(self._unconfirmed) >= self._max_items

  @property
  def has_room(self) -> bool:
    """Whether it is worth to wake who waits for room: for half of the window.

    Who is woken for each item writes requests of one item each.
    """
    return 2 * len(self._unconfirmed) <= self._max_items

  @property
  def is_settled(self) -> bool:
    """Whether nothing calls for a new stream, once the last one has ended."""
    return not (self._unconfirmed or self._doubtful)

  @property
  def has_unsent(self) -> bool:
    """Whether `take` has something."""
    return bool(self._unsent)

  def add(self, key: int, encoded: list[encoder.Encoded], copies: int) -> bool:
    """Takes an item over.

    Args:
      key: the item's.
      encoded: its data.
      copies: how often its key is confirmed.

    Returns:
      Whether it is the last one that fits into a request.
    """
    item = _Item(key, encoded, copies)
    self._unconfirmed[key] = item
    self._unsent.append(item)
    self._new_items += 1
    self._new_bytes += sum([one.num_bytes for one in encoded])
    fills = (
      self._new_items >= _MAX_REQUEST_ITEMS
      or self._new_bytes >= _MAX_REQUEST_BYTES
    )
    if fills:
      self._new_items = self._new_bytes = 0
    return fills

  def take(self) -> list:
    """Parts of the next request, oldest items first; none if all are sent."""
    parts: list = []
    num_items = num_bytes = 0
    while self._unsent and num_items < _MAX_REQUEST_ITEMS:
      item = self._unsent[0]
      num_bytes += sum([one.num_bytes for one in item.encoded])
      if num_items and num_bytes > _MAX_REQUEST_BYTES:
        break
      for one in item.encoded:
        parts += one.parts
      self._unsent.popleft()
      self.resent += item.sent
      item.sent = True
      num_items += 1
    return parts

  def confirm(self, keys: Iterable[int]) -> None:
    """Notes what the server confirmed; an item once it did so for each copy."""
    now_s = time.monotonic()
    for key in keys:
      item = self._unconfirmed.get(key)
      if item is None:
        continue
      item.awaited -= 1
      if not item.awaited:
        del self._unconfirmed[key]
        self.confirmed += 1
        self._doubtful.append((now_s, item))
    self._believe(now_s)

  def end_stream(self) -> None:
    """Notes that the stream has ended; call it when it does."""
    self._believe(time.monotonic())

  def send_again(self, same_server: bool) -> None:
    """Lets `take` begin anew, for a new stream.

    Args:
      same_server: whether the server has not been restarted since the last
        stream; else it is sent once more what the old one confirmed at last.
    """
    again = [] if same_server else [item for _, item in self._doubtful]
    self._doubtful.clear()
    self.confirmed -= len(again)
    again += self._unconfirmed.values()
    for item in again:
      item.awaited = item.copies
    self._unconfirmed = {item.key: item for item in again}
    self._unsent = collections.deque(again)

  def _believe(self, now_s: float) -> None:
    while self._doubtful and self._doubtful[0][0] < now_s - _DOUBTFUL_S:
      self._doubtful.popleft()
