"""The policy engine of an endpoint: tells listeners of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunix_reverb.actor import engine as engine_lib
from tunix_reverb.actor.endpoint import sessions as sessions_lib


class ListenedEngine(engine_lib.Engine):
  """An engine whose slots are those of `Sessions`.

  A turn is as long as its request allows, and its tokens are told as they are
  sampled.
  """

  def __init__(
    self, *args: Any, sessions: sessions_lib.Sessions, **kwargs: Any
  ):
    """See base class; sessions: hears."""
    super().__init__(*args, **kwargs)
    self._sessions = sessions

  def feed(self, slot: int, tokens: Sequence[int], max_new_tokens: int) -> None:
    """See base class."""
    most = min(max_new_tokens, self._sessions.max_new_tokens(slot))
    super().feed(slot, tokens, most)

  def step(self) -> list[engine_lib.Turn]:
    """See base class."""
    turns = super().step()
    for turn in turns:
      self._sessions.hear(
        turn.slot, turn.tokens.tolist(), turn.log_probs.tolist(), True
      )
    for slot, tokens, log_probs in self.turns_under_way():
      self._sessions.hear(slot, tokens, log_probs, False)
    return turns
