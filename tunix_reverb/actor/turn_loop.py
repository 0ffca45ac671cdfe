"""The loop of actors whose environments are played in turns of tokens.

  environment --what the policy has not read--> engine --its turn--> environment

Environments that think (a tool, an API) hold up nobody: the engine goes on with
the others, and takes newer variables between any two tokens. An episode begins
when there is a permit for it and ends as a trajectory of tokens; episodes of a
group begin together and end as one item (see `groups`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import time
from typing import Protocol

import dm_env
import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.actor import engine as engine_lib
from tunix_reverb.actor import groups as groups_lib
from tunix_reverb.actor import loop as loop_lib
from tunix_reverb.actor import permit_line
from tunix_reverb.actor import recorder as recorder_lib
from tunix_reverb.telemetry import timing

_FIRST = int(dm_env.StepType.FIRST)
_LAST = int(dm_env.StepType.LAST)
_PADDING = -1

# Between two looks for permits while environments are at work, seconds.
_POLL_S = 0.02


class TrajectoryAdder(Protocol):
  """Takes whole trajectories."""

  def add(self, trajectories: types.Trajectories) -> None:
    """Takes one, or those of a group, which stay together."""

  def send_due(self) -> None:
    """Sends what has waited long enough."""

  def flush(self) -> None:
    """Sends everything."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnConfig:
  """How episodes are played and recorded.

  Attributes:
    max_turn_tokens: of one turn of the policy.
    token_dtype: in which tokens are stored.
    seed: every episode gets its own from it.
    actor_id: stored with every trajectory.
    group_size: environments that play the same task together.
    advantage: what a group says of its members, of `groups.ADVANTAGES`.
    in_turn: permits go by number, see `PermitLine`.
  """

  max_turn_tokens: int
  token_dtype: np.dtype
  seed: int
  actor_id: int = 0
  group_size: int = 1
  advantage: str = groups_lib.NONE
  in_turn: bool = False


class TurnLoop(loop_lib.ActorLoop):
  """Plays N environments with an engine of N slots."""

  def __init__(
    self,
    *,
    environment: core.VectorEnvironment,
    engine: engine_lib.Engine,
    adder: TrajectoryAdder,
    variables: core.VariableSource,
    variable_update_period_s: float,
    permits: core.PermitSource,
    config: TurnConfig,
    environment_metrics: Callable[[], Mapping[str, float]] = dict,
  ):
    """Call `wait_for_variables` before `step`.

    Args:
      environment: N turn environments; those of a group follow each other.
      engine: its slots are the environments' ids.
      adder: takes the trajectories.
      variables: where newer variables come from.
      variable_update_period_s: how often they are asked for.
      permits: where permits come from, one for each group.
      config: see there.
      environment_metrics: what the environments report of themselves.
    """
    super().__init__(
      environment=environment,
      policy=engine,
      adder=adder,
      variables=variables,
      variable_update_period_s=variable_update_period_s,
    )
    self.account = timing.TimeAccount('environment', 'act', 'adder', 'permit')
    self._engine = engine
    self._config = config
    self._environment_metrics = environment_metrics
    num, size = environment.num_environments, config.group_size
    self._groups = [
      groups_lib.Group(range(begin, begin + size), config.advantage)
      for begin in range(0, num, size)
    ]
    self._line = permit_line.PermitLine(
      permits, len(self._groups), in_turn=config.in_turn
    )
    # Environments that owe a timestep, and what those that do not are sent.
    self._owing = set(range(num))
    self._outbox: dict[int, Sequence[int]] = {}
    self._episodes = np.zeros(num, np.int64)  # Begun by each.

  @property
  def num_parked(self) -> int:
    """How many environments wait for a permit or for its variables."""
    return self._line.num_parked * self._config.group_size

  @property
  def is_parked(self) -> bool:
    """Whether there is nothing to do but to wait for permits."""
    return not (self._owing or self._outbox or self._engine.has_work)

  @property
  def progress(self) -> int:
    """See base class; a turn may take long."""
    return self._engine.tokens_total

  def metrics(self) -> dict[str, float]:
    """See base class."""
    return {
      'tokens_total': self._engine.tokens_total,
      'active_episodes': self._engine.num_active,
      **self._environment_metrics(),
    }

  def close(self) -> None:
    """Gives back the permits whose trajectories have not ended; idempotent."""
    held = [g.permit_id for g in self._groups if g.permit_id]
    self._line.close(held)
    self._engine.close()

  def step(self, timeout_s: float) -> bool:
    """Hears the environments that are ready, writes a token of every turn.

    Args:
      timeout_s: longest wait, where there is nothing to write, seconds.

    Returns:
      False when nothing could be done in time.
    """
    ready = self._receive(timeout_s)
    self._update_variables()
    if ready is not None:
      with self.account.measure('adder'):
        self._hear(*ready)
    self._begin()
    with self.account.measure('act'):
      turns = self._engine.step()
    for turn in turns:
      self._group_of(turn.slot).playing[turn.slot].write(turn)
      self._outbox[turn.slot] = turn.tokens
    self.actor_steps += len(turns)
    with self.account.measure('environment'):
      self._send()
    with self.account.measure('adder'):
      self._adder.send_due()
    return ready is not None or self._engine.has_work or bool(turns)

  def _receive(
    self, timeout_s: float
  ) -> tuple[np.ndarray, dm_env.TimeStep] | None:
    """Waits for an environment, or for a permit if all wait for one."""
    line, version = self._line, self.policy_version
    line.fetch(0.0)
    if self._engine.has_work or line.can_release(version):
      timeout_s = 0.0
    elif self.is_parked:
      with self.account.measure('permit'):
        line.fetch(timeout_s)
        if line.wanted_version > version:
          self._take_variables(line.wanted_version, timeout_s)
      return None
    elif line.is_waiting:
      timeout_s = min(timeout_s, _POLL_S)
    with self.account.measure('environment'):
      return self._environment.recv(timeout_s)

  def _take_variables(self, min_version: int, timeout_s: float) -> None:
    newer = self._variables.get_variables(min_version, timeout_s)
    if newer is not None:
      self._engine.set_variables(newer)

  def _group_of(self, environment_id: int) -> groups_lib.Group:
    return self._groups[environment_id // self._config.group_size]

  def _hear(self, ids: np.ndarray, timestep: dm_env.TimeStep) -> None:
    """What K environments said, batched [K]."""
    self.statistics.observe(ids, timestep)
    columns = (
      ids,
      timestep.step_type,
      timestep.reward,
      timestep.discount,
      timestep.observation,
    )
    for i, step_type, reward, discount, observation in zip(
      *(column.tolist() for column in columns)
    ):
      self._owing.discard(i)
      tokens = _without_padding(observation)
      group = self._group_of(i)
      if step_type == _FIRST:
        group.leave(i)  # An environment that failed has been replaced.
        group.prompts[i] = tokens
        self._close_group(i)
        continue
      recorder = group.playing[i]
      recorder.reward(reward)
      if step_type == _LAST:
        if discount > 0 and self._fits(recorder, tokens, 0):
          recorder.read(tokens, self.policy_version)
        group.end(i, discount)
        self._outbox[i] = ()  # Any action: the next timestep is FIRST.
        self._close_group(i)
      else:
        self._feed(i, recorder, tokens)

  def _close_group(self, environment_id: int) -> None:
    """Hands over what the group has played; lets it stand in line again."""
    group = self._group_of(environment_id)
    played = group.take()
    if played is not None:
      self._adder.add(played)
    if group.is_complete and group.permit_id is None:
      self._line.park([environment_id // self._config.group_size])
    elif group.is_complete:  # It has kept the permit of what was lost.
      self._begin_group(group)

  def _begin(self) -> None:
    """Begins the episodes that there are permits for."""
    numbers, permit_ids = self._line.release(self.policy_version)
    for number, permit_id in zip(numbers, permit_ids):
      group = self._groups[number]
      group.permit_id = permit_id
      self._begin_group(group)

  def _begin_group(self, group: groups_lib.Group) -> None:
    now_s = time.time()
    prompts, group.prompts = group.prompts, {}
    for i, prompt in prompts.items():
      path = [self._config.seed, i, int(self._episodes[i])]
      self._episodes[i] += 1
      self._engine.start(i, _episode_seed(path))
      recorder = recorder_lib.Recorder(
        token_dtype=self._config.token_dtype,
        actor_id=self._config.actor_id,
        episode_id=int(self._episodes.sum()),
        created_at_s=now_s,
      )
      group.playing[i] = recorder
      self._feed(i, recorder, prompt)

  def _feed(
    self, i: int, recorder: recorder_lib.Recorder, tokens: Sequence[int]
  ) -> None:
    """Lets the policy read `tokens` and write its next turn."""
    if not self._fits(recorder, tokens, 1):
      raise errors.UserError(
        f'trajectory_length ({self._engine.max_length - 1}) must hold every '
        f'episode of tokens whole; one of environment {i} has '
        f'{recorder.num_tokens + len(tokens)} tokens before its last turn: '
        'raise it, and bucket_lengths with it'
      )
    recorder.read(tokens, self.policy_version)
    self._engine.feed(i, tokens, self._config.max_turn_tokens)

  def _fits(
    self, recorder: recorder_lib.Recorder, tokens: Sequence[int], more: int
  ) -> bool:
    size = recorder.num_tokens + len(tokens) + more
    return size <= self._engine.max_length

  def _send(self) -> None:
    """Sends the turns that have ended."""
    if not self._outbox:
      return
    ids = sorted(self._outbox)
    shape = (len(ids), self._config.max_turn_tokens)
    action = np.full(shape, _PADDING, np.int32)
    for row, i in enumerate(ids):
      tokens = self._outbox[i]
      action[row, : len(tokens)] = tokens
    self._outbox.clear()
    self._owing.update(ids)
    self._environment.send(action, np.array(ids, np.int32))


def _without_padding(tokens: list[int]) -> list[int]:
  return tokens[: tokens.index(_PADDING)] if _PADDING in tokens else tokens


def _episode_seed(path: Sequence[int]) -> int:
  """Below 2**63, different for each path."""
  state = np.random.SeedSequence(path).generate_state(1, np.uint64)
  return int(state[0]) >> 1
