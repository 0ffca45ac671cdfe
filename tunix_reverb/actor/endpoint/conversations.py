"""Episodes of agents outside: which tokens a request adds to a conversation.

An agent sends its whole conversation with every request. Where it begins with
what we have seen and said, word for word, the request goes on with the tokens
that are there: what the policy wrote stays in the tokens that it wrote. Where
the agent has changed what was before (shortened it, edited it, gone back), the
trajectory is cut, and a new one begins: a segment. Everything here runs in the
server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence
import dataclasses
import time
from typing import Any

from tunix_reverb import errors
from tunix_reverb.actor.endpoint import protocol
from tunix_reverb.actor.endpoint import sessions as sessions_lib
from tunix_reverb.text import tokeniser as tokeniser_lib

# Between two looks for a free slot, seconds.
_POLL_S = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What agents may take.

  Attributes:
    max_length: tokens of a trajectory.
    max_turn_tokens: of a turn.
    slot_timeout_s: seconds that a request waits for a free slot.
    turn_timeout_s: seconds that it waits for a turn's next token.
    idle_timeout_s: seconds after which an episode that nobody uses is given up.
    max_episodes: that are known at a time, with those that are over.
  """

  max_length: int
  max_turn_tokens: int
  slot_timeout_s: float
  turn_timeout_s: float
  idle_timeout_s: float
  max_episodes: int = 10_000


@dataclasses.dataclass
class Counts:
  """What has happened so far."""

  episodes: int = 0
  turns: int = 0
  segments_cut: int = 0
  abandoned: int = 0


class Episode:
  """One episode of an agent, named by it.

  Attributes:
    lock: held by the request that is served.
    messages: of the conversation, the policy's answers included.
    tools: that it was begun with.
    slot: of the trajectory under way; None if there is none.
    segments: trajectories begun.
    is_over: whether the reward has come, or nobody came.
  """

  def __init__(self, name: str):
    """Args: name: the agent's."""
    self.name = name
    self.lock = asyncio.Lock()
    self.messages: list[tokeniser_lib.Message] = []
    self.tools: Sequence[tokeniser_lib.ToolSchema] = ()
    self.slot: int | None = None
    self.num_tokens = 0
    self.num_turns = 0
    self.segments = 0
    self.ended_with_stop = True
    self.is_truncated = False
    self.is_over = False
    self.used_s = time.monotonic()

  def new_messages(
    self, request: protocol.Request
  ) -> Sequence[tokeniser_lib.Message] | None:
    """What the request adds; None if it does not go on from here."""
    known = len(self.messages)
    if self.slot is None or list(request.tools) != list(self.tools):
      return None
    if list(request.messages[:known]) != self.messages:
      return None
    return request.messages[known:] or None


@dataclasses.dataclass(frozen=True)
class Turn:
  """A turn that has been asked for.

  Attributes:
    num_prompt_tokens: read before it.
    written: gives its tokens as they come.
  """

  num_prompt_tokens: int
  written: AsyncGenerator[sessions_lib.Written, None]


class Conversations:
  """All episodes, by name."""

  def __init__(
    self,
    sessions: sessions_lib.Sessions,
    chat_format: tokeniser_lib.ChatFormat,
    limits: Limits,
  ):
    """Call `expire` now and then.

    Args:
      sessions: where the policy is.
      chat_format: of its model.
      limits: see there.
    """
    self._sessions = sessions
    self._format = chat_format
    self._limits = limits
    self._episodes: dict[str, Episode] = {}
    # Of the turns that are waited for; None ends the wait.
    self._queues: set[asyncio.Queue[sessions_lib.Written | None]] = set()
    self._is_closed = False
    self.counts = Counts()

  def episode(self, name: str | None, *, create: bool) -> Episode:
    """The episode of that name.

    Args:
      name: of the header.
      create: whether it may be a new one.

    Raises:
      protocol.RequestError: there is none, or it is over.
    """
    if not name or len(name) > 200:
      raise protocol.RequestError(
        'the header X-Episode-Id must name the episode, in at most 200 '
        'characters'
      )
    episode = self._episodes.get(name)
    if episode is None:
      if not create:
        raise protocol.RequestError(
          f'there is no episode {name!r}', status=404, code='not_found'
        )
      self._make_room()
      episode = self._episodes[name] = Episode(name)
      self.counts.episodes += 1
    if episode.is_over:
      raise protocol.RequestError(
        f'episode {name!r} is over; name another one',
        status=409,
        code='episode_over',
      )
    return episode

  async def ask(self, episode: Episode, request: protocol.Request) -> Turn:
    """Asks the policy for the next turn; hold the episode's lock.

    Raises:
      protocol.RequestError: it does not fit, or there is no slot.
    """
    if self._is_closed:
      raise _closed()
    episode.used_s = time.monotonic()
    added = episode.new_messages(request)
    tokens = self._tokens(episode, request, added)
    before = 0 if added is None else episode.num_tokens
    most = self._room(episode, before + len(tokens), request)
    if added is None:
      await self._begin_segment(episode)
    queue: asyncio.Queue[sessions_lib.Written | None] = asyncio.Queue()
    self._queues.add(queue)
    loop = asyncio.get_running_loop()
    listener = lambda written: loop.call_soon_threadsafe(
      queue.put_nowait, written
    )
    say = self._sessions.begin if added is None else self._sessions.go_on
    say(episode.slot, tokens, max_new_tokens=most, listener=listener)
    episode.messages = list(request.messages)
    episode.tools = request.tools
    episode.num_tokens = before + len(tokens)
    return Turn(episode.num_tokens, self._written(episode, queue))

  def answered(
    self, episode: Episode, message: dict[str, Any], tokens: Sequence[int]
  ) -> None:
    """The policy's turn is complete and has been said as `message`."""
    episode.messages.append(protocol.normalise(message))
    episode.ended_with_stop = tokens[-1] in self._format.stop_tokens
    episode.num_tokens += len(tokens)
    episode.num_turns += 1
    episode.used_s = time.monotonic()
    self.counts.turns += 1

  def end(self, episode: Episode, *, reward: float, truncated: bool) -> None:
    """Ends an episode with its reward; hold its lock.

    Raises:
      protocol.RequestError: nothing has been written.
    """
    if episode.slot is None or not episode.num_turns:
      raise protocol.RequestError(
        f'episode {episode.name!r} has no turn to be rewarded',
        status=409,
        code='no_turn',
      )
    self._sessions.end(
      episode.slot, reward=reward, truncated=truncated or episode.is_truncated
    )
    episode.slot, episode.is_over = None, True

  def close(self) -> None:
    """Answers those who wait that there will be no turn."""
    self._is_closed = True
    for queue in self._queues:
      queue.put_nowait(None)

  def expire(self) -> None:
    """Gives up the episodes that nobody has used for long."""
    now_s = time.monotonic()
    for episode in list(self._episodes.values()):
      idle_s = now_s - episode.used_s
      if episode.lock.locked() or idle_s < self._limits.idle_timeout_s:
        continue
      self._abandon(episode)
      del self._episodes[episode.name]

  def _abandon(self, episode: Episode) -> None:
    """Drops the trajectory under way; nothing of it is learnt from."""
    if episode.slot is not None:
      self._sessions.abandon(episode.slot)
      self.counts.abandoned += 1
    episode.slot, episode.num_turns = None, 0

  def _make_room(self) -> None:
    """Forgets an episode that is over where there are too many."""
    if len(self._episodes) < self._limits.max_episodes:
      return
    for name, episode in self._episodes.items():
      if episode.is_over:
        del self._episodes[name]
        return
    raise protocol.RequestError(
      f'{len(self._episodes)} episodes are open: reward or drop some',
      status=429,
      code='too_many_episodes',
    )

  def _tokens(
    self,
    episode: Episode,
    request: protocol.Request,
    added: Sequence[tokeniser_lib.Message] | None,
  ) -> list[int]:
    """What the policy has not read yet."""
    try:
      if added is None:
        return self._format.first(request.messages, request.tools)
      return self._format.following(added, ended=episode.ended_with_stop)
    except errors.UserError as e:
      raise protocol.RequestError(str(e)) from e

  def _room(
    self, episode: Episode, num_tokens: int, request: protocol.Request
  ) -> int:
    """Tokens that the turn may have.

    Raises:
      protocol.RequestError: none.
    """
    left = self._limits.max_length - num_tokens
    if left < 1:
      episode.is_truncated = True
      raise protocol.RequestError(
        f"this model's maximum context length is {self._limits.max_length} "
        f'tokens, and the messages have {num_tokens}: shorten them, or post '
        'the reward',
        code='context_length_exceeded',
      )
    return min(left, self._limits.max_turn_tokens, request.max_tokens or left)

  async def _begin_segment(self, episode: Episode) -> None:
    """Takes a slot for a new trajectory; cuts the one under way."""
    if episode.slot is not None and episode.num_turns:
      # More comes, in the next segment: the learner bootstraps.
      self._sessions.end(episode.slot, reward=0.0, truncated=True)
      self.counts.segments_cut += 1
      episode.slot = None
    self._abandon(episode)
    episode.slot = await self._take_slot()
    episode.segments += 1
    episode.num_turns = 0
    episode.is_truncated = False

  async def _take_slot(self) -> int:
    deadline_s = time.monotonic() + self._limits.slot_timeout_s
    while True:
      slot = self._sessions.take()
      if slot is not None:
        return slot
      left_s = deadline_s - time.monotonic()
      if left_s <= 0:
        raise protocol.RequestError(
          f'all {self._sessions.num_environments} conversations are taken: '
          'post rewards of those that are over, or try again',
          status=503,
          code='no_slot',
        )
      # The loop frees slots when it has taken note of their end.
      await asyncio.sleep(_POLL_S)

  async def _written(
    self, episode: Episode, queue: asyncio.Queue[sessions_lib.Written | None]
  ) -> AsyncGenerator[sessions_lib.Written, None]:
    is_last = False
    try:
      while not is_last:
        try:
          written = await asyncio.wait_for(
            queue.get(), self._limits.turn_timeout_s
          )
        except TimeoutError as e:
          raise protocol.RequestError(
            'the policy did not go on within '
            f'{self._limits.turn_timeout_s:g} s: it waits for a permit or for '
            'variables of the learner',
            status=503,
            code='policy_timeout',
          ) from e
        if written is None:
          raise _closed()
        is_last = written.is_last
        yield written
    finally:
      self._queues.discard(queue)
      if not is_last:  # The client has gone, or waited too long.
        self._abandon(episode)


def _closed() -> protocol.RequestError:
  return protocol.RequestError(
    'the endpoint ends: its run is over, or was told to stop',
    status=503,
    code='endpoint_closed',
  )
