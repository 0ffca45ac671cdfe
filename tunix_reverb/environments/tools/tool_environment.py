"""Episodes of turns with tools, as a `dm_env.Environment` of tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import time
from typing import Any

import dm_env
from dm_env import specs
import numpy as np

from tunix_reverb import errors
from tunix_reverb.environments import turns
from tunix_reverb.environments.tools import calls as calls_lib
from tunix_reverb.environments.tools import episodes as episodes_lib
from tunix_reverb.environments.tools import runner
from tunix_reverb.environments.tools import task as task_lib
from tunix_reverb.environments.tools import transcript as transcript_lib
from tunix_reverb.text import tokeniser as tokeniser_lib

_FIRST, _MID, _LAST = dm_env.StepType
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
# Of one turn; what is beyond is an error for the policy.
_MAX_CALLS = 8
# Prompts in a row that do not fit, before the limit is taken to be a mistake.
_MAX_SKIPPED = 100


class ToolEnvironment(dm_env.Environment):
  """See `turns` for what observations and actions are.

  An action's tokens after its first stop token do not count. A call that
  cannot be read or made, or whose tool fails, is answered by an error message;
  an exception of the task itself is raised, and fails the environment. The
  reward of a turn comes with the timestep that answers it.
  """

  def __init__(
    self,
    task: task_lib.Task,
    *,
    chat_format: tokeniser_lib.ChatFormat,
    limits: task_lib.Limits,
    seed: int,
    episodes: episodes_lib.Hold | None = None,
    on_episode: Callable[[transcript_lib.Transcript], None] | None = None,
  ):
    """Makes one.

    Args:
      task: the source of instances; closed with the environment.
      chat_format: of the policy's model.
      limits: of an episode.
      seed: of the task, int >= 0. With an episode's number it determines the
        instance, whatever happened before.
      episodes: numbers the episodes to come; by default from 0.
      on_episode: called with each episode when it is over, the failed ones
        too, in the thread that steps the environment.
    """
    self._task = task
    self._format = chat_format
    self._limits = limits
    self._seed = seed
    self._episodes = episodes or episodes_lib.Episodes().hold()
    self._on_episode = on_episode
    self._stop_tokens = frozenset(chat_format.stop_tokens)
    self._instance: task_lib.Instance | None = None
    self._transcript: transcript_lib.Transcript | None = None
    size = chat_format.tokeniser.vocabulary_size
    self._observation_spec = turns.observation_spec(
      limits.max_observation_tokens, size
    )
    self._action_spec = turns.action_spec(limits.max_turn_tokens, size)

  @property
  def transcript(self) -> transcript_lib.Transcript | None:
    """Of the episode that runs or ran last; None before the first."""
    return self._transcript

  @property
  def chat_format(self) -> tokeniser_lib.ChatFormat:
    """Of the policy's model."""
    return self._format

  @property
  def limits(self) -> task_lib.Limits:
    """Of an episode."""
    return self._limits

  def reset(self) -> dm_env.TimeStep:
    start = self._episodes.peek()
    if self._transcript is not None:
      start = max(start, self._transcript.episode + 1)
    for episode in range(start, start + _MAX_SKIPPED):
      generator = np.random.default_rng((self._seed, episode))
      instance = self._task.start(generator)
      messages = list(instance.messages)
      prompt = self._format.first(messages, [t.schema for t in instance.tools])
      if self._fits(prompt):
        break
    else:
      raise errors.UserError(
        f'max_observation_tokens ({self._limits.max_observation_tokens}) must '
        f'hold the prompts of the task: {_MAX_SKIPPED} in a row did not fit, '
        f'the last one of {len(prompt)} tokens; make it larger'
      )
    self._instance = instance
    self._transcript = transcript_lib.Transcript(
      seed=self._seed, episode=episode, messages=messages, prompt=prompt
    )
    return dm_env.restart(self._observation(prompt))

  def _fits(self, prompt: Sequence[int]) -> bool:
    limits = self._limits
    rest = limits.max_tokens - limits.max_turn_tokens
    return len(prompt) <= min(limits.max_observation_tokens, rest)

  def step(self, action: Any) -> dm_env.TimeStep:
    """`action` is the policy's turn, i32 [max_turn_tokens]."""
    if self._transcript is None or self._transcript.outcome != 'running':
      return self.reset()
    return dm_env.TimeStep(*self.step_raw(action))

  def step_raw(self, action: Any) -> tuple:
    """As `step`, of a running episode (see `canonical`)."""
    episode = self._transcript
    if not episode.turns:
      self._episodes.use(episode.episode)
    try:
      timestep = self._answer(turns.unpack(action))
    except BaseException as e:
      episode.outcome, episode.cause = 'failed', repr(e)
      self._finish()
      raise
    if timestep[0] == _LAST:
      self._finish()
    return timestep

  def _finish(self) -> None:
    if self._on_episode is not None:
      self._on_episode(self._transcript)

  def _answer(self, tokens: list[int]) -> tuple:
    """The timestep that answers a turn."""
    episode, instance = self._transcript, self._instance
    turn, calls = self._read(tokens)
    episode.turns.append(turn)
    episode.messages.append({'role': 'assistant', 'content': turn.text})
    results = self._make_calls(turn, calls)
    turn.reward = _finite(instance.turn_reward(episode), 'turn_reward')
    more = instance.next_messages(episode)
    if more is None:
      episode.outcome = 'terminated'
      episode.messages += results
      episode.score = _finite(instance.score(episode), 'score')
      turn.reward += episode.score
      return _LAST, np.float32(turn.reward), _ZERO, self._observation([])
    return self._go_on(turn, [*results, *more])

  def _read(
    self, tokens: list[int]
  ) -> tuple[transcript_lib.Turn, Sequence[calls_lib.Call]]:
    """Cuts a turn at its stop token; returns it and the calls to make."""
    for i, token in enumerate(tokens):
      if token in self._stop_tokens:
        tokens = tokens[: i + 1]
        break
    text = _valid(self._format.text(tokens))
    parsed = calls_lib.parse(text, self._format.call_marker)
    turn = transcript_lib.Turn(tokens=tokens, text=text, content=parsed.content)
    turn.errors += parsed.errors
    if len(parsed.calls) > _MAX_CALLS:
      turn.errors.append(
        f'a turn may hold {_MAX_CALLS} calls, not {len(parsed.calls)}; the '
        'others were not made'
      )
    return turn, parsed.calls[:_MAX_CALLS]

  def _make_calls(
    self, turn: transcript_lib.Turn, calls: Sequence[calls_lib.Call]
  ) -> list[tokeniser_lib.Message]:
    """Calls the tools one after the other; returns what they answered."""
    messages = []
    latest = time.monotonic() + self._limits.calls_s
    for call in calls:
      record = runner.run(call, self._instance.tools, latest=latest)
      record.result = _valid(record.result)
      turn.calls.append(record)
      messages.append(_tool_message(record.name, record.result))
    for error in turn.errors:
      messages.append(_tool_message('error', _valid(f'error: {error}')))
    return messages

  def _go_on(
    self, turn: transcript_lib.Turn, messages: list[tokeniser_lib.Message]
  ) -> tuple:
    """MID, or LAST where a limit cuts the episode."""
    episode, limits = self._transcript, self._limits
    ended = bool(turn.tokens) and turn.tokens[-1] in self._stop_tokens
    messages, tokens = self._following(messages, ended)
    episode.messages += messages
    rest = limits.max_tokens - episode.num_tokens - limits.max_turn_tokens
    if len(tokens) > limits.max_observation_tokens:
      cause, tokens = 'max_observation_tokens', []
    elif len(episode.turns) >= limits.max_turns:
      cause = 'max_turns'
    elif len(tokens) > rest:
      cause = 'max_tokens'
    else:
      cause = None
    reward = np.float32(turn.reward)
    turn.observation = tokens
    if cause is None:
      return _MID, reward, _ONE, self._observation(tokens)
    episode.outcome, episode.cause = 'truncated', cause
    return _LAST, reward, _ONE, self._observation(tokens)

  def _following(
    self, messages: list[tokeniser_lib.Message], ended: bool
  ) -> tuple[list[tokeniser_lib.Message], list[int]]:
    """`messages` and their tokens; the longest are cut where too long."""
    tokens = self._format.following(messages, ended=ended)
    fits, most = 0, max((len(m['content']) for m in messages), default=0)
    if len(tokens) <= self._limits.max_observation_tokens:
      return messages, tokens
    # The most characters of a message with which all fit.
    while fits < most:
      length = (fits + most + 1) // 2
      if len(self._cut(messages, length, ended)[1]) <= (
        self._limits.max_observation_tokens
      ):
        fits = length
      else:
        most = length - 1
    return self._cut(messages, fits, ended)

  def _cut(
    self, messages: list[tokeniser_lib.Message], length: int, ended: bool
  ) -> tuple[list[tokeniser_lib.Message], list[int]]:
    """`messages` of at most `length` characters each, and their tokens."""
    cut = [{**m, 'content': m['content'][:length]} for m in messages]
    return cut, self._format.following(cut, ended=ended)

  def _observation(self, tokens: Sequence[int]) -> np.ndarray:
    return turns.pack(tokens, self._limits.max_observation_tokens)

  def oracle(self) -> np.ndarray | None:
    """The next turn of a perfect policy, i32 [max_turn_tokens].

    None if the task cannot say. Only while an episode runs.

    Raises:
      errors.UserError: the turn is longer than the limit allows.
    """
    if self._instance.oracle is None:
      return None
    said = self._instance.oracle(self._transcript)
    if isinstance(said, calls_lib.Call):
      said = calls_lib.render(said, self._format.call_marker)
    tokens = self._format.turn(said)
    if len(tokens) > self._limits.max_turn_tokens:
      raise errors.UserError(
        f'max_turn_tokens ({self._limits.max_turn_tokens}) must hold the '
        f'turns of a perfect policy; one has {len(tokens)} tokens'
      )
    return turns.pack(tokens, self._limits.max_turn_tokens)

  def observation_spec(self) -> specs.BoundedArray:
    return self._observation_spec

  def action_spec(self) -> specs.BoundedArray:
    return self._action_spec

  def reward_spec(self) -> specs.Array:
    return specs.Array((), np.float32, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, 0.0, 1.0, name='discount')

  def close(self) -> None:
    self._task.close()


def make(
  task: task_lib.Task,
  *,
  chat_format: tokeniser_lib.ChatFormat,
  limits: task_lib.Limits | None = None,
  **kwargs: Any,
) -> ToolEnvironment:
  """Makes an environment with the limits that suit the task and the format."""
  if limits is None:
    is_plain = chat_format.call_marker is not None
    limits = task.character_limits if is_plain else task.limits
  if limits is None:
    raise errors.UserError(
      f'task ({type(task).__name__}) must be played by a pretrained model, '
      'which --model names: its text does not fit the sixteen tokens of models '
      'from scratch'
    )
  return ToolEnvironment(task, chat_format=chat_format, limits=limits, **kwargs)


def _tool_message(name: str, content: str) -> dict[str, str]:
  return {'role': 'tool', 'name': name, 'content': content}


def _valid(text: str) -> str:
  """`text` without lone surrogates, which no tokeniser takes."""
  return text.encode('utf-8', 'replace').decode('utf-8')


def _finite(value: float, name: str) -> float:
  value = float(value)
  if not np.isfinite(value):
    raise ValueError(f'{name} ({value}) must be finite')
  return value
