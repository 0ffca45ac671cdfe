"""The policy engine of token actors: continuous batching over fixed slots.

  engine.start(slot, episode_seed)
  engine.feed(slot, prompt, max_new_tokens=64)
  while ...:
    for turn in engine.step():       # whichever turns have ended
      ...
      engine.feed(turn.slot, tool_result, max_new_tokens=64)

Each slot holds the keys and values of one episode, whose turn is written a
token per step. A slot that waits to be fed takes no part in a step, and the
others go on: a step costs what the slots that have work need. Prompts and tool
results are read in chunks, many tokens at a time. All programs, one for each of
a few numbers of slots and of tokens, are compiled when the engine is made.

New variables count from the next step on, in the middle of turns as well: every
token carries the version that it was sampled with. Keys and values that older
variables have computed stay in the cache until the episode ends.

Letters: N slots, K of them in a call, C tokens of each, m tokens of a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tunix_reverb import types
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import decoding

# Tokens of one slot that are read in one call, while they are fed. Of the
# larger ones as many as fit twice into an episode.
_CHUNKS = (16, 128)
# From one number of slots to the next. 2 would compile twice as many programs,
# and a call of few slots costs about the same.
_SIZE_FACTOR = 4
# Most tokens of all slots in such a call: more would take memory, not save
# time.
_CALL_TOKENS = 1024


class Turn(NamedTuple):
  """What the policy wrote, until a stop token or as long as it might.

  Attributes:
    slot: whose turn.
    tokens: i32 [m], the stop token included if there is one.
    log_probs: f32 [m], at the temperature that they were sampled at.
    policy_versions: i32 [m], of the variables that they were sampled with.
  """

  slot: int
  tokens: np.ndarray
  log_probs: np.ndarray
  policy_versions: np.ndarray


class _Slot:
  """One episode's place."""

  def __init__(self, key: np.ndarray):
    self.key = key
    self.position = 0  # Tokens in the cache.
    self.unread: list[int] = []
    self.room = 0  # Tokens the turn may still have; 0 between turns.
    self.tokens: list[int] = []
    self.log_probs: list[float] = []
    self.versions: list[int] = []


class Engine:
  """Samples the turns of up to N episodes.

  What an episode samples depends on the variables, its seed and its own past:
  not on its slot, nor on which others there are (up to the rounding of matrix
  products of other sizes).
  """

  def __init__(
    self,
    config: config_lib.TransformerConfig,
    *,
    num_slots: int,
    max_length: int,
    dtype: str,
    stop_tokens: Sequence[int],
    temperature: float = 1.0,
    greedy: bool = False,
  ):
    """An engine without variables yet: call `set_variables` first.

    Args:
      config: what the model is.
      num_slots: N.
      max_length: most tokens of an episode.
      dtype: of the computation inside the blocks, as the learner's.
      stop_tokens: any of them ends a turn.
      temperature: of the policy, as the learner's.
      greedy: takes the most likely token instead of sampling.
    """
    self._params: Any = None
    self.policy_version = 0
    self.num_slots = num_slots
    self.max_length = max_length
    self._stop_tokens = frozenset(stop_tokens)
    self._slots: list[_Slot | None] = [None] * num_slots
    self._dtype = dtype
    self._cache = decoding.empty_cache(
      config, num_slots=num_slots, length=max_length, dtype=dtype
    )
    self.tokens_total = 0  # Sampled so far.
    chunks = [c for c in _CHUNKS if 2 * c <= max_length] or [max_length]
    # Numbers of slots for each number of tokens.
    self._sizes = {
      chunk: _sizes(min(num_slots, max(1, _CALL_TOKENS // chunk)))
      for chunk in chunks
    } | {1: _sizes(num_slots)}
    self._programs = _compile(
      functools.partial(_call, config, temperature=temperature, greedy=greedy),
      decoding.prepared_shapes(config, dtype),
      self._cache,
      self._sizes,
    )

  def close(self) -> None:
    """Nothing is held beyond this process's memory."""

  @property
  def has_work(self) -> bool:
    """Whether a step would do anything."""
    return any(slot is not None and slot.room for slot in self._slots)

  @property
  def num_active(self) -> int:
    """Slots whose turn is being written."""
    return sum(slot is not None and slot.room > 0 for slot in self._slots)

  def set_variables(self, variables: types.Variables) -> None:
    """Samples with `variables` from the next step on."""
    params = decoding.prepare(
      jax.tree_util.tree_map(jnp.asarray, variables.params), self._dtype
    )
    self._params = decoding.place(params)
    self.policy_version = variables.policy_version

  def start(self, slot: int, episode_seed: int) -> None:
    """Begins an episode in `slot`; whatever was there is forgotten.

    Args:
      slot: 0..N-1.
      episode_seed: 0 <= seed < 2**63, one for each episode: equal ones with
        equal prompts are clones.
    """
    key = np.array([episode_seed >> 32, episode_seed & 0xFFFFFFFF], np.uint32)
    self._slots[slot] = _Slot(key)

  def cancel(self, slot: int) -> None:
    """Ends the episode in `slot`."""
    self._slots[slot] = None

  def length_left(self, slot: int) -> int:
    """Tokens that the episode may still have, fed or sampled."""
    one = self._slot(slot)
    return self.max_length - one.position - len(one.unread)

  def feed(self, slot: int, tokens: Sequence[int], max_new_tokens: int) -> None:
    """Gives `slot` something to read, after which it writes a turn.

    Args:
      slot: with an episode, and no turn being written.
      tokens: the prompt, or what follows the last turn; may be empty then.
      max_new_tokens: at which the turn ends without a stop token, >= 1; less
        where the episode reaches `max_length`.

    Raises:
      ValueError: there is nothing to read, no room to write, or a turn is being
        written.
    """
    one = self._slot(slot)
    if one.room:
      raise ValueError(f'slot ({slot}) must not be writing a turn')
    if not one.unread and not len(tokens):
      raise ValueError(f'tokens of slot {slot} (none) must be a prompt')
    room = min(max_new_tokens, self.length_left(slot) - len(tokens))
    if room < 1:
      raise ValueError(
        f'tokens of slot {slot} ({len(tokens)}) must leave room for a turn: '
        f'max_length ({self.max_length}) leaves {self.length_left(slot)}, and '
        f'max_new_tokens is {max_new_tokens}'
      )
    one.unread += [int(token) for token in tokens]
    one.room = room
    one.tokens, one.log_probs, one.versions = [], [], []

  def step(self) -> list[Turn]:
    """Reads a chunk of what was fed, writes a token of each turn under way.

    Returns:
      The turns that have ended, by slot.
    """
    working = [
      i for i, slot in enumerate(self._slots) if slot is not None and slot.room
    ]
    to_read = [i for i in working if len(self._slot(i).unread) > 1]
    to_write = [i for i in working if len(self._slot(i).unread) == 1]
    ended: list[int] = []
    for ids, chunk in ((to_read, self._chunk(to_read)), (to_write, 1)):
      # Those that find no place come in the next step.
      ids = ids[: self._sizes[chunk][-1]]
      if ids:
        ended += self._advance(ids, chunk)
    return [self._take(i) for i in sorted(ended)]

  def turns_under_way(self) -> list[tuple[int, list[int], list[float]]]:
    """(slot, tokens, log-probs) of every turn that has begun and not ended."""
    return [
      (i, list(slot.tokens), list(slot.log_probs))
      for i, slot in enumerate(self._slots)
      if slot is not None and slot.room and slot.tokens
    ]

  def _slot(self, index: int) -> _Slot:
    slot = self._slots[index]
    if slot is None:
      raise ValueError(f'slot ({index}) must have an episode: call start')
    return slot

  def _chunk(self, ids: Sequence[int]) -> int:
    """The smallest chunk that reads all of them, or else the largest."""
    longest = max((len(self._slot(i).unread) for i in ids), default=1)
    chunks = sorted(self._sizes)
    return next((c for c in chunks if c >= longest), chunks[-1])

  def _advance(self, ids: Sequence[int], chunk: int) -> list[int]:
    """Reads up to `chunk` tokens of each slot, samples where all are read.

    Returns:
      Those whose turn has ended.
    """
    size = next(s for s in self._sizes[chunk] if s >= len(ids))
    reading, keys = self._gather(ids, size, chunk)
    tokens, log_probs, self._cache = self._programs[size, chunk](
      self._params, self._cache, reading, keys
    )
    tokens, log_probs = np.asarray(tokens), np.asarray(log_probs)
    ended = []
    for i, count, token, log_prob in zip(
      ids, reading.counts.tolist(), tokens.tolist(), log_probs.tolist()
    ):
      slot = self._slot(i)
      slot.position += count
      del slot.unread[:count]
      if slot.unread:
        continue
      slot.unread.append(token)
      slot.tokens.append(token)
      slot.log_probs.append(log_prob)
      slot.versions.append(self.policy_version)
      slot.room -= 1
      self.tokens_total += 1
      if not slot.room or token in self._stop_tokens:
        slot.room = 0
        ended.append(i)
    return ended

  def _gather(
    self, ids: Sequence[int], size: int, chunk: int
  ) -> tuple[decoding.Reading, np.ndarray]:
    """What a call of `size` slots reads, and their keys, u32 [K, 2]."""
    slots = np.full(size, self.num_slots, np.int32)
    tokens = np.zeros((size, chunk), np.int32)
    starts = np.zeros(size, np.int32)
    counts = np.ones(size, np.int32)
    keys = np.zeros((size, 2), np.uint32)
    for row, i in enumerate(ids):
      slot = self._slot(i)
      unread = slot.unread[:chunk]
      slots[row] = i
      tokens[row, : len(unread)] = unread
      starts[row] = slot.position
      counts[row] = len(unread)
      keys[row] = slot.key
    return decoding.Reading(slots, tokens, starts, counts), keys

  def _take(self, index: int) -> Turn:
    slot = self._slot(index)
    return Turn(
      index,
      np.array(slot.tokens, np.int32),
      np.array(slot.log_probs, np.float32),
      np.array(slot.versions, np.int32),
    )


def _sizes(largest: int) -> list[int]:
  """1, 4, 16, ... below `largest`, and `largest`."""
  sizes = [1]
  while sizes[-1] * _SIZE_FACTOR < largest:
    sizes.append(sizes[-1] * _SIZE_FACTOR)
  return sizes + [largest] * (largest > 1)


def _call(
  config: config_lib.TransformerConfig,
  params: types.Nest,
  cache: decoding.Cache,
  reading: decoding.Reading,
  keys: jax.Array,
  *,
  temperature: float,
  greedy: bool,
) -> tuple[jax.Array, jax.Array, decoding.Cache]:
  """(next tokens i32 [K], their log-probs f32 [K], the cache)."""
  log_probs, cache = decoding.read(
    config, params, cache, reading, temperature=temperature
  )
  if greedy:
    tokens = jnp.argmax(log_probs, axis=-1)
  else:
    tokens = jax.vmap(_sample)(keys, reading.starts + reading.counts, log_probs)
  chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
  return tokens.astype(jnp.int32), chosen, cache


def _sample(
  key: jax.Array, position: jax.Array, log_probs: jax.Array
) -> jax.Array:
  """A key for each token of an episode; log_probs f32 [V]."""
  return jax.random.categorical(jax.random.fold_in(key, position), log_probs)


def _compile(
  call: Any,
  params: types.Nest,
  cache: decoding.Cache,
  sizes: dict[int, list[int]],
) -> dict[tuple[int, int], Any]:
  """The program of every (K, C), by shapes alone."""
  shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)
  jitted = jax.jit(call, donate_argnums=1)
  return {
    (size, chunk): jitted.lower(
      params,
      cache,
      decoding.Reading(
        shape(size), shape(size, chunk), shape(size), shape(size)
      ),
      jax.ShapeDtypeStruct((size, 2), jnp.uint32),
    ).compile()
    for chunk, of_chunk in sizes.items()
    for size in of_chunk
  }
