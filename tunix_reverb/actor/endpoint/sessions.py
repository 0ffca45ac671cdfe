"""Where agents outside and the actor's loop meet: N slots of conversations.

To the loop this is N turn environments whose timesteps come when somebody
outside speaks: FIRST with the first request of a conversation, MID with each
that goes on with it, LAST with the reward. To those who serve requests it is a
place to leave tokens and to be told what the policy wrote. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import threading
import time
from typing import NamedTuple

import dm_env
import numpy as np

from tunix_reverb import core

_FIRST, _MID, _LAST = (int(step) for step in dm_env.StepType)
_PADDING = -1


class Written(NamedTuple):
  """Tokens of a turn, as they come.

  Attributes:
    tokens: those that are new.
    log_probs: of them.
    is_last: whether the turn ends with them.
  """

  tokens: Sequence[int]
  log_probs: Sequence[float]
  is_last: bool


Listener = Callable[[Written], None]


@dataclasses.dataclass
class _Slot:
  """One conversation's place.

  Attributes:
    is_taken: whether it belongs to a conversation.
    is_owing: whether the next timestep is ours; else the policy writes.
    is_over: whether LAST was said, so that the next timestep is FIRST.
    listener: hears what the policy writes.
    end: the last tokens of a turn, until the loop lets us speak again.
    max_new_tokens: of the turn that is asked for.
    num_heard: tokens of the turn that the listener has been told of.
  """

  is_taken: bool = False
  is_owing: bool = True
  is_over: bool = False
  listener: Listener | None = None
  end: Written | None = None
  max_new_tokens: int = 0
  num_heard: int = 0


class Sessions(core.VectorEnvironment):
  """See the module's docstring. One thread is the loop's, others serve."""

  def __init__(self, *, num_slots: int, max_length: int):
    """All slots are free.

    Args:
      num_slots: N, conversations at a time.
      max_length: most tokens of a conversation.
    """
    self._max_length = max_length
    self._slots = [_Slot() for _ in range(num_slots)]
    # (slot, step type, reward, discount, tokens), until the loop takes them.
    self._said: list[tuple[int, int, float, float, Sequence[int]]] = []
    self._changed = threading.Condition()
    self._is_closed = False
    self._abandoned = 0
    self._on_close: list[Callable[[], None]] = []

  @property
  def num_environments(self) -> int:
    """See base class."""
    return len(self._slots)

  @property
  def failures(self) -> Mapping[str, int]:
    """See base class; those that nobody ended."""
    return {'error': 0, 'timeout': self._abandoned}

  @property
  def is_idle(self) -> bool:
    """Whether nobody waits for the policy."""
    with self._changed:
      return not self._said and not any(
        slot.is_taken and not slot.is_owing for slot in self._slots
      )

  def recv(self, timeout_s: float) -> tuple[np.ndarray, dm_env.TimeStep] | None:
    """See base class; observations are i32 [K, max_length], padded with -1."""
    deadline_s = time.monotonic() + timeout_s
    with self._changed:
      while not self._said:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or self._is_closed:
          return None
        self._changed.wait(left_s)
      said, self._said = sorted(self._said), []
    ids, step_types, rewards, discounts, tokens = zip(*said)
    observation = np.full((len(ids), self._max_length), _PADDING, np.int32)
    for row, part in zip(observation, tokens):
      row[: len(part)] = part
    return np.array(ids, np.int32), dm_env.TimeStep(
      np.array(step_types, np.int32),
      np.array(rewards, np.float32),
      np.array(discounts, np.float32),
      observation,
    )

  def send(self, action: np.ndarray, environment_ids: np.ndarray) -> None:
    """See base class; what it says has been told by `hear` already."""
    del action
    ends = []
    with self._changed:
      for i in environment_ids.tolist():
        slot = self._slots[i]
        slot.is_owing = True
        if slot.end is not None and slot.listener is not None:
          ends.append((slot.listener, slot.end))
        slot.end = None
        if slot.is_over:
          self._slots[i] = _Slot()
    # Not before: they may answer at once.
    for listener, end in ends:
      listener(end)

  def hear(
    self,
    slot: int,
    tokens: Sequence[int],
    log_probs: Sequence[float],
    is_last: bool,
  ) -> None:
    """The loop tells of all tokens of a turn so far.

    Args:
      slot: whose turn.
      tokens: from the beginning of the turn.
      log_probs: of them.
      is_last: whether the turn is complete; `send` follows.
    """
    with self._changed:
      one = self._slots[slot]
      new = slice(one.num_heard, len(tokens))
      one.num_heard = len(tokens)
      written = Written(tokens[new], log_probs[new], is_last)
      if is_last:
        one.end = written
        return
      listener = one.listener
    if listener is not None and written.tokens:
      listener(written)

  def max_new_tokens(self, slot: int) -> int:
    """Of the turn that was asked for last."""
    with self._changed:
      return self._slots[slot].max_new_tokens

  def take(self) -> int | None:
    """A free slot, which is now taken; None if there is none."""
    with self._changed:
      for i, slot in enumerate(self._slots):
        if not slot.is_taken and slot.is_owing:
          slot.is_taken = True
          return i
    return None

  def begin(
    self,
    slot: int,
    tokens: Sequence[int],
    *,
    max_new_tokens: int,
    listener: Listener,
  ) -> None:
    """Says the prompt of a conversation, for its first turn.

    Args:
      slot: taken.
      tokens: of the prompt.
      max_new_tokens: of the turn, >= 1.
      listener: called in the loop's thread; must not block.
    """
    self._ask(slot, _FIRST, tokens, max_new_tokens, listener)

  def go_on(
    self,
    slot: int,
    tokens: Sequence[int],
    *,
    max_new_tokens: int,
    listener: Listener,
  ) -> None:
    """Says what follows the last turn, for the next one; see `begin`."""
    self._ask(slot, _MID, tokens, max_new_tokens, listener)

  def end(self, slot: int, *, reward: float, truncated: bool) -> None:
    """Ends the conversation and frees the slot.

    Args:
      slot: whose last turn is complete.
      reward: of the last turn.
      truncated: whether it was cut off, so that more would have come.
    """
    with self._changed:
      self._slots[slot].is_over = True
      self._say(slot, _LAST, reward, float(truncated), ())

  def abandon(self, slot: int) -> None:
    """Gives the slot to others; the conversation is not learnt from.

    Its trajectory is dropped when another conversation begins there.
    """
    with self._changed:
      one = self._slots[slot]
      one.listener = None
      self._abandoned += 1
      if one.is_owing:
        self._slots[slot] = _Slot()
      else:
        one.is_over = True  # Free once the turn is written.

  def on_close(self, callback: Callable[[], None]) -> None:
    """Calls `callback` before anything is closed, the last one first."""
    self._on_close.append(callback)

  def close(self) -> None:
    """See base class."""
    while self._on_close:
      self._on_close.pop()()
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()

  def _ask(
    self,
    slot: int,
    step_type: int,
    tokens: Sequence[int],
    max_new_tokens: int,
    listener: Listener,
  ) -> None:
    with self._changed:
      one = self._slots[slot]
      one.listener, one.max_new_tokens = listener, max_new_tokens
      one.num_heard = 0
      self._say(slot, step_type, 0.0, 1.0, tokens)

  def _say(
    self,
    slot: int,
    step_type: int,
    reward: float,
    discount: float,
    tokens: Sequence[int],
  ) -> None:
    one = self._slots[slot]
    assert one.is_taken and one.is_owing, f'slot {slot} cannot speak'
    one.is_owing = False
    self._said.append((slot, step_type, reward, discount, tokens))
    self._changed.notify_all()
