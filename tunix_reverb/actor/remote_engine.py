"""A policy engine that is somebody else's server.

Takes the place of `engine.Engine` in an actor: turns are asked of an
OpenAI-compatible server, tokens in and tokens out. Of its `completions` it must
take a prompt of token ids, and give the ids and log-probabilities of what it
has sampled, in any of these forms:

  choices[0].token_ids, choices[0].logprobs.token_logprobs    vLLM, which is
      asked for the first by `return_token_ids`
  choices[0].logprobs.tokens as 'token_id:<id>'               older vLLM
  choices[0].logprobs.content with id and logprob             llama.cpp

The log-probabilities must be those at the run's temperature: where a server
gives those before temperature (vLLM's default), leave it at 1. The policy's
version is that of the learner's variables when a turn is asked for, though
somebody else's policy need not be made of them: the ratio of both policies
corrects for what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import queue
import time
from typing import Any

import numpy as np

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.actor import engine as engine_lib

# Longest wait of a step, so that the loop sees to the environments.
_STEP_S = 0.01
_RETRIES = 3
_BACK_OFF_S = 1.0


class _Slot:
  """One episode's place."""

  def __init__(self, seed: int):
    self.seed = seed
    self.tokens: list[int] = []
    self.is_writing = False


class RemoteEngine:
  """See `engine.Engine`, whose methods these are.

  Attributes:
    num_slots: N.
    max_length: most tokens of an episode.
    policy_version: of the variables that were taken last.
    tokens_total: sampled so far.
  """

  def __init__(
    self,
    url: str,
    *,
    num_slots: int,
    max_length: int,
    stop_tokens: Sequence[int],
    temperature: float,
    timeout_s: float,
  ):
    """Looks the server's model up.

    Args:
      url: the server's base URL, with its /v1.
      num_slots: N, requests at a time.
      max_length: most tokens of an episode.
      stop_tokens: any of them ends a turn.
      temperature: of the policy.
      timeout_s: seconds that a turn may take.

    Raises:
      errors.UserError: there is no such server.
      errors.MissingExtraError: the package httpx is absent.
    """
    try:
      import httpx
    except ImportError as e:
      raise errors.MissingExtraError(
        'policy_url needs the package httpx: install the extra agents'
      ) from e
    self.num_slots = num_slots
    self.max_length = max_length
    self.policy_version = 0
    self.tokens_total = 0
    self._url = url.rstrip('/')
    self._settings = {
      'temperature': temperature,
      'stop_token_ids': list(stop_tokens),
      'logprobs': 1,
      'return_token_ids': True,
      'return_tokens_as_token_ids': True,
    }
    self._stop_tokens = frozenset(stop_tokens)
    self._transport_error = httpx.TransportError
    self._client = httpx.Client(timeout=timeout_s)
    self._settings['model'] = self._find_model()
    self._pool = futures.ThreadPoolExecutor(num_slots, 'remote_policy')
    self._slots: list[_Slot | None] = [None] * num_slots
    self._done: queue.SimpleQueue[tuple[_Slot, int, Any]] = queue.SimpleQueue()

  @property
  def has_work(self) -> bool:
    """Whether a turn is under way."""
    return self.num_active > 0

  @property
  def num_active(self) -> int:
    """Slots whose turn is being written."""
    return sum(slot is not None and slot.is_writing for slot in self._slots)

  def set_variables(self, variables: types.Variables) -> None:
    """Takes over the version alone."""
    self.policy_version = variables.policy_version

  def start(self, slot: int, episode_seed: int) -> None:
    """See `Engine.start`."""
    self._slots[slot] = _Slot(episode_seed)

  def feed(self, slot: int, tokens: Sequence[int], max_new_tokens: int) -> None:
    """See `Engine.feed`."""
    one = self._slots[slot]
    assert one is not None and not one.is_writing, f'slot {slot} is not free'
    one.tokens += [int(token) for token in tokens]
    room = min(max_new_tokens, self.max_length - len(one.tokens))
    if room < 1:
      raise ValueError(f'tokens of slot {slot} must leave room for a turn')
    one.is_writing = True
    body = {
      **self._settings,
      'prompt': list(one.tokens),
      'max_tokens': room,
      # Another one for each turn, or turns would be drawn alike.
      'seed': (one.seed + len(one.tokens)) & 0x7FFFFFFF,
    }
    version = self.policy_version
    job = self._pool.submit(self._complete, body)
    job.add_done_callback(
      lambda job: self._done.put((one, slot, (job, version)))
    )

  def step(self) -> list[engine_lib.Turn]:
    """The turns that have come; waits a moment for the first.

    Raises:
      errors.UserError: the server does not answer as it must.
      RuntimeError: it could not be reached, again and again.
    """
    turns: list[engine_lib.Turn] = []
    timeout_s = _STEP_S if self.has_work else 0.0
    while True:
      try:
        one, index, (job, version) = self._done.get(timeout=timeout_s or 1e-9)
      except queue.Empty:
        return turns
      timeout_s = 0.0
      tokens, log_probs = job.result()
      if self._slots[index] is not one:
        continue  # Of an episode that was given up.
      one.is_writing = False
      one.tokens += tokens
      self.tokens_total += len(tokens)
      turns.append(
        engine_lib.Turn(
          index,
          np.array(tokens, np.int32),
          np.array(log_probs, np.float32),
          np.full(len(tokens), version, np.int32),
        )
      )

  def close(self) -> None:
    """Cuts the requests under way."""
    self._client.close()
    self._pool.shutdown(wait=False, cancel_futures=True)

  def _find_model(self) -> str:
    try:
      answer = self._client.get(f'{self._url}/models', timeout=10.0)
      return answer.raise_for_status().json()['data'][0]['id']
    # Of httpx, or of what the answer lacks.
    except Exception as e:  # pylint: disable=broad-exception-caught
      self._client.close()
      raise errors.UserError(
        f'policy_url ({self._url!r}) must be the base URL of an '
        f'OpenAI-compatible server, with its /v1: {e}'
      ) from e

  def _complete(self, body: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """(tokens, log-probs) of one turn; in a thread of the pool."""
    for attempt in range(_RETRIES + 1):
      try:
        answer = self._client.post(f'{self._url}/completions', json=body)
      except self._transport_error as e:
        problem = repr(e)
      else:
        if answer.status_code == 200:
          return self._read(answer.json())
        problem = f'status {answer.status_code}: {answer.text[:200]}'
        if answer.status_code < 500 and answer.status_code != 429:
          raise errors.UserError(
            f'policy_url ({self._url!r}) refuses a completion of token ids: '
            f'{problem}'
          )
      if attempt < _RETRIES:
        time.sleep(_BACK_OFF_S * 2**attempt)
    raise RuntimeError(f'{self._url} failed {_RETRIES + 1} times: {problem}')

  def _read(self, answer: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    try:
      tokens, log_probs = _tokens(answer['choices'][0])
    except (
      AttributeError,
      KeyError,
      IndexError,
      TypeError,
      ValueError,
    ) as e:
      raise errors.UserError(
        f'policy_url ({self._url!r}) must answer with token ids and their '
        f'log-probabilities; of those there are none: {e!r}'
      ) from e
    for i, token in enumerate(tokens):
      if token in self._stop_tokens:
        return tokens[: i + 1], log_probs[: i + 1]
    return tokens, log_probs


def _tokens(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
  """Whichever form they are in; see the module's docstring."""
  found = choice['logprobs']
  if found.get('content') and 'id' in found['content'][0]:
    tokens = [entry['id'] for entry in found['content']]
    log_probs = [entry['logprob'] for entry in found['content']]
  else:
    log_probs = found['token_logprobs']
    tokens = choice.get('token_ids') or [
      int(text.removeprefix('token_id:')) for text in found['tokens']
    ]
  if not tokens or len(tokens) != len(log_probs):
    raise ValueError(f'{len(tokens)} tokens, {len(log_probs)} log-probs')
  return [int(t) for t in tokens], [float(p) for p in log_probs]
