"""The interfaces between roles.

Shaped after the interfaces of Acme (Hoffman et al. 2020, arXiv:2006.00979,
section 2), so that existing DeepMind-style agents and loops compose with these
parts. Roles never import each other: they meet here, and `agents/` wires them.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

import dm_env
import numpy as np

from tunix_reverb import types


class VariableSource(abc.ABC):
  """Where actors and evaluators get the learner's variables."""

  @abc.abstractmethod
  def get_variables(
    self, min_version: int = 0, timeout_s: float = 0.0
  ) -> types.Variables | None:
    """Returns the newest variables if their version >= `min_version`.

    Waits up to `timeout_s` seconds for them and returns None at the deadline.

    Raises:
      errors.ReplayUnavailableError: the source has failed for good.
    """

  def age_s(self) -> float:
    """Seconds since the newest variables were published; NaN if unknown."""
    return math.nan


class VariableSink(abc.ABC):
  """Where the learner publishes its variables."""

  @property
  def confirmed_version(self) -> int:
    """Newest version known to be published, also after a missed deadline."""
    return 0

  @abc.abstractmethod
  def publish(self, variables: types.Variables, timeout_s: float) -> None:
    """Makes `variables` the newest.

    Raises:
      errors.DeadlineExceededError: not confirmed within `timeout_s`.
    """


class ItemWriter(abc.ABC):
  """Inserts replay items into one table. Never blocks beyond a deadline."""

  @abc.abstractmethod
  def write(
    self, trajectories: types.Trajectories, timeout_s: float | None = None
  ) -> bool:
    """Hands one item over; its priority is its minimum `policy_version`.

    Returns True when the item was taken over for sending, and False when the
    table's rate limiter (or the network) left no room within `timeout_s`
    seconds (None: the writer's default): then nothing was written and the
    same call may be repeated.

    Raises:
      errors.SpecMismatchError: the columns differ from the table's signature.
      errors.ReplayUnavailableError: the writer has failed for good.
    """

  @abc.abstractmethod
  def blocked_s(self) -> float:
    """Seconds that `write` has spent waiting for room, in total."""

  def blocked_by_network_s(self) -> float:
    """Those of `blocked_s` that the table's rate limiter is not to blame for.

    Then the server was silent, or the items were still on their way. 0 from a
    client that cannot tell.
    """
    return 0.0

  @abc.abstractmethod
  def close(self, timeout_s: float) -> bool:
    """Sends what was taken over. Returns whether all of it was confirmed."""


class ItemSampler(abc.ABC):
  """Reads items from one table of one or several servers."""

  @property
  def poison_items(self) -> int:
    """Items skipped so far because they could not be read."""
    return 0

  @abc.abstractmethod
  def sample(self, timeout_s: float) -> types.SampledItem | None:
    """The next item, or None if none came within `timeout_s` seconds.

    Raises:
      errors.ReplayUnavailableError: the sampler has failed for good.
    """

  @abc.abstractmethod
  def close(self) -> list[types.SampledItem]:
    """Stops reading; items already prefetched are lost to the table.

    Returns:
      Those received that `sample` has not returned; none at a second call.
    """


class Adder(abc.ABC):
  """Writes one environment's interaction into tables, one step at a time."""

  @abc.abstractmethod
  def add_first(self, timestep: dm_env.TimeStep) -> None:
    """Starts an episode with its FIRST timestep."""

  @abc.abstractmethod
  def add(
    self, action: types.Nest, next_timestep: dm_env.TimeStep, extras: Any = ()
  ) -> None:
    """Adds the transition that `action` caused.

    Args:
      action: what was passed to `env.step`.
      next_timestep: what `env.step` returned.
      extras: a mapping with `log_prob`, `policy_version` and, for recurrent
        policies, `core_state` (the state before the next action).
    """

  @abc.abstractmethod
  def reset(self) -> None:
    """Drops the unfinished episode."""


class VectorAdder(abc.ABC):
  """Writes the interaction of N environments, K of them at a time."""

  @abc.abstractmethod
  def add(
    self,
    environment_ids: np.ndarray,
    *,
    action: types.Nest,
    behaviour_log_prob: np.ndarray,
    policy_version: np.ndarray,
    timestep: dm_env.TimeStep,
    core_state: types.Nest = (),
  ) -> None:
    """Adds what K environments answered.

    FIRST starts an episode, and drops an unfinished one of that environment;
    what its action, log-probability and version say is ignored.

    Args:
      environment_ids: i32 [K], ascending.
      action: [K, ...], what led to `timestep`.
      behaviour_log_prob: f32 [K], of `action`.
      policy_version: i32 [K], of the variables that chose `action`.
      timestep: batched; reward, discount and step_type [K].
      core_state: nest of [K, ...], recurrent state before the next action.

    Raises:
      ValueError: the first timestep of an environment is not FIRST.
    """

  @abc.abstractmethod
  def flush(self) -> None:
    """Sends the finished trajectories; unfinished ones stay open."""


class Actor(abc.ABC):
  """Chooses actions for one environment and records what follows."""

  @abc.abstractmethod
  def select_action(self, observation: types.Nest) -> types.Nest:
    """Samples the behaviour policy for one unbatched observation."""

  @abc.abstractmethod
  def observe_first(self, timestep: dm_env.TimeStep) -> None:
    """Records the FIRST timestep of an episode."""

  @abc.abstractmethod
  def observe(self, action: types.Nest, next_timestep: dm_env.TimeStep) -> None:
    """Records the timestep that followed `action`."""

  @abc.abstractmethod
  def update(self, wait: bool = False) -> None:
    """Takes newer variables if there are any; with `wait`, waits for them."""


class VectorEnvironment(abc.ABC):
  """N copies of one environment behind one interface of arrays.

  Timesteps follow dm_env: after LAST, the next action of that environment is
  ignored and FIRST comes back. `reward` and `discount` of FIRST are 0 and 1.
  """

  @property
  @abc.abstractmethod
  def num_environments(self) -> int:
    """N."""

  @property
  @abc.abstractmethod
  def failures(self) -> Mapping[str, int]:
    """Environments replaced so far, by cause: 'error' and 'timeout'.

    The episode of a replaced environment is lost; its next timestep is FIRST.
    """

  @abc.abstractmethod
  def recv(self, timeout_s: float) -> tuple[np.ndarray, dm_env.TimeStep] | None:
    """Timesteps of the K <= N environments that are ready.

    The first call returns FIRST timesteps. The arrays may be reused by the
    next `recv`: copy what must outlive it.

    Returns:
      (environment_ids int32 [K], ascending, TimeStep with step_type int32
      [K], reward f32 [K], discount f32 [K], observation nest of [K, ...]), or
      None when no environment answered within `timeout_s` seconds.
    """

  @abc.abstractmethod
  def send(self, action: types.Nest, environment_ids: np.ndarray) -> None:
    """Steps `environment_ids` [K] with `action`, a nest of [K, ...]."""

  @abc.abstractmethod
  def close(self) -> None:
    """Closes every environment; idempotent."""


class PermitSource(abc.ABC):
  """Where an actor gets its permits. Never blocks beyond a deadline."""

  @abc.abstractmethod
  def request(self, count: int) -> None:
    """Asks for `count` permits more; they come whenever the learner gives."""

  @abc.abstractmethod
  def take(self, timeout_s: float) -> list[types.Permit]:
    """The permits that have come, in the order of issue.

    Waits up to `timeout_s` seconds for the first if there is none.
    """

  @abc.abstractmethod
  def close(self, held: Sequence[int] = ()) -> None:
    """Asks for no more, and gives permits back unused; idempotent.

    Args:
      held: ids of permits taken whose trajectories will not be sent; those
        that nobody has taken go back with them.
    """


class PermitTable(abc.ABC):
  """The learner's end of the table of permits, of which it is the one feeder.

  Every call raises errors.DeadlineExceededError (its fate is unknown) or
  errors.ReplayUnavailableError.
  """

  @abc.abstractmethod
  def reset(self) -> None:
    """Empties the table; its counters start from 0."""

  @abc.abstractmethod
  def state(self) -> types.PermitTableState:
    """Its counters."""

  @abc.abstractmethod
  def insert(self, permits: Sequence[types.Permit]) -> None:
    """Appends `permits`, in this order."""

  @abc.abstractmethod
  def delete(self, permit_ids: Sequence[int]) -> None:
    """Deletes permits, from the last to the first.

    So that whatever actors take meanwhile, those taken come before those
    deleted.
    """

  @abc.abstractmethod
  def removals(self) -> list[types.Removal]:
    """Takes what has been removed from the trajectory tables since."""


class Learner(abc.ABC):
  """Turns batches into variables."""

  @abc.abstractmethod
  def step(self) -> Mapping[str, float] | None:
    """One update on the next batch; None if no batch came in time."""

  @abc.abstractmethod
  def run(self, num_learner_steps: int | None = None) -> None:
    """Steps until told to stop or `num_learner_steps` are done."""

  @abc.abstractmethod
  def get_variables(self, names: Sequence[str] = ()) -> list[types.Nest]:
    """Params on the host, by name (Acme's signature); all if none is named."""

  @abc.abstractmethod
  def save(self) -> types.Nest:
    """The full learner state as a pytree of host arrays."""

  @abc.abstractmethod
  def restore(self, state: types.Nest) -> None:
    """Takes over a state that `save` returned, bit for bit."""


BatchIterator = Iterator[types.PackedBatch]
