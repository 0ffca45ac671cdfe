"""N Python environments behind `core.VectorEnvironment`, stepped in turn.

`AsynchronousVectorEnvironment`, re-exported here, is for slow environments.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import operator
from typing import Any

import dm_env
import numpy as np

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.environments import asynchronous
from tunix_reverb.environments import buffers
from tunix_reverb.environments import canonical
from tunix_reverb.environments import failures as failures_lib

AsynchronousVectorEnvironment = asynchronous.AsynchronousVectorEnvironment

_FIRST, _MID, _LAST = dm_env.StepType
_CLOSE_TIMEOUT_S = 5.0

EnvironmentFactory = Callable[[], dm_env.Environment]


class SynchronousVectorEnvironment(core.VectorEnvironment):
  """Steps N environments one after the other, in the caller's thread.

  For fast environments: the cost on top of `env.step` is well under a
  microsecond per step. The environments are stepped inside `recv`, so the
  arrays of the last `recv` stay valid until the next one. No environment can
  be interrupted: one that hangs, hangs the caller (use the asynchronous kind).

  An environment that raises is replaced by a new one and its episode is cut:
  its next timestep is FIRST.
  """

  def __init__(
    self,
    factories: Sequence[EnvironmentFactory],
    *,
    max_consecutive_failures: int = 10,
  ):
    """Args:
    factories: N callables; each makes one environment, and another one in
      its place after a failure.
    max_consecutive_failures: of one environment, without a completed step
      in between, before `recv` raises RuntimeError.
    """
    if not factories:
      raise ValueError('factories (empty) must hold at least one factory')
    num = len(factories)
    self._factories = list(factories)
    self._failures = failures_lib.FailureLog(max_consecutive_failures)
    self._environments: list[Any] = [None] * num
    self._steps: list[Any] = [None] * num
    self._resets: list[Any] = [None] * num
    for index in range(num):
      self._install(index)
    # What the next `send` calls for each environment.
    self._calls = list(self._resets)
    self._environment_ids = np.arange(num, dtype=np.int32)
    self._all_ids = self._environment_ids.tolist()
    self._pending_ids: list[int] = list(self._all_ids)
    self._pending_actions: list = [None] * num
    self._closed = False
    spec = self._environments[0].observation_spec()
    self._scalar_action = self._environments[0].action_spec().shape == ()
    self._buffers = buffers.TimestepBuffers(spec, num)

  def _install(self, index: int) -> None:
    """Makes environment `index`."""
    environment = canonical.canonicalise(self._factories[index]())
    self._environments[index] = environment
    self._steps[index] = environment.step_raw
    self._resets[index] = lambda action: environment.reset()

  @property
  def num_environments(self) -> int:
    return len(self._factories)

  @property
  def failures(self) -> Mapping[str, int]:
    """Failures so far by cause ('error'; never 'timeout' here)."""
    return self._failures.counts

  def recv(self, timeout_s: float) -> tuple[np.ndarray, dm_env.TimeStep] | None:
    """Steps the environments sent to. `timeout_s` bounds nothing here: with
    nothing sent, nothing can arrive and None comes back at once."""
    ids = self._pending_ids
    if not ids or self._closed:
      return None
    actions, self._pending_ids, self._pending_actions = (
      self._pending_actions,
      [],
      [],
    )
    timesteps = self._step_all(ids, actions)
    fields = tuple(zip(*timesteps))
    step_types = fields[0]
    if step_types.count(_MID) != len(ids) or self._failures.failing:
      self._choose_next_calls(ids, step_types)
    if ids is self._all_ids:
      environment_ids = self._environment_ids
    else:
      environment_ids = np.array(ids, np.int32)
    return environment_ids, self._buffers.write(*fields)

  def _step_all(self, ids: list[int], actions: list) -> list[tuple]:
    """Calls what is next for each of `ids`; replaces those that raise."""
    all_calls = self._calls
    calls = all_calls if ids is self._all_ids else [all_calls[i] for i in ids]
    timesteps: list[tuple] = []
    while True:
      done = len(timesteps)
      try:
        # `extend` keeps what came before an exception.
        timesteps.extend(map(operator.call, calls[done:], actions[done:]))
        return timesteps
      except Exception as e:  # pylint: disable=broad-except
        timesteps.append(self._replace(ids[len(timesteps)], e))

  def _choose_next_calls(self, ids: list[int], step_types: tuple) -> None:
    """After LAST comes a reset, after FIRST a step."""
    for index, step_type in zip(ids, step_types):
      if step_type == _LAST:
        self._calls[index] = self._resets[index]
      elif step_type == _FIRST:
        self._calls[index] = self._steps[index]
      self._failures.succeeded(index, step_type)

  def _replace(self, index: int, error: Exception) -> dm_env.TimeStep:
    """A new environment in place of a failed one; returns its FIRST."""
    while True:
      failures_lib.close_in_background(self._environments[index].close)
      self._failures.record(index, 'error', error)
      try:
        self._install(index)
        self._calls[index] = self._resets[index]
        return self._environments[index].reset()
      except Exception as e:  # pylint: disable=broad-except
        error = e

  def send(self, action: types.Nest, environment_ids: np.ndarray) -> None:
    if self._closed:
      raise RuntimeError('send() was called after close()')
    if environment_ids.size == len(self._all_ids):
      ids = self._all_ids  # They come in ascending order.
    else:
      ids = environment_ids.tolist()
    if self._pending_ids and not set(ids).isdisjoint(self._pending_ids):
      raise ValueError(
        f'environment_ids ({ids}) must have come from recv() since they '
        'were last sent'
      )
    action = np.asarray(action)
    # Python ints are the fastest actions there are for Python environments.
    actions = action.tolist() if self._scalar_action else list(action)
    if len(actions) != len(ids):
      raise ValueError(
        f'action (leading dim {len(actions)}) must have one row for each of '
        f'the {len(ids)} environment_ids'
      )
    self._pending_ids = self._pending_ids + ids if self._pending_ids else ids
    self._pending_actions += actions

  def close(self) -> None:
    if self._closed:
      return
    self._closed = True
    thread = failures_lib.close_in_background(
      *[e.close for e in self._environments]
    )
    thread.join(_CLOSE_TIMEOUT_S)
