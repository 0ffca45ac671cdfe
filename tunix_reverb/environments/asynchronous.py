"""N slow environments, each in its own thread; none waits for another.

For environments that wait for something else than this process: a simulator,
an API, a language model. Threads share one interpreter lock, so environments
that compute in Python gain nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import queue
import threading
import time
from typing import Any

from absl import logging
import dm_env
import numpy as np

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.environments import buffers
from tunix_reverb.environments import canonical
from tunix_reverb.environments import failures as failures_lib

# After the first timestep, how long others may join it: a policy call for one
# costs about what it costs for all. Not where the caller has no time to wait.
_JOIN_S = 0.002
# Making and resetting an environment may take longer than a step.
_MIN_RESTART_TIMEOUT_S = 30.0
_FIRST_BACK_OFF_S = 0.1
_MAX_BACK_OFF_S = 5.0
_CLOSE_TIMEOUT_S = 5.0
_STOP = object()


class AsynchronousVectorEnvironment(core.VectorEnvironment):
  """Steps N environments at once; `recv` returns those that have answered.

  An environment that raises, or does not answer in `timeout_s`, is replaced by
  a new one and its episode is cut: its next timestep is FIRST. A thread that
  hangs is left behind; it ends, and closes its environment, when its call
  returns.
  """

  def __init__(
    self,
    factories: Sequence[Callable[[], dm_env.Environment]],
    *,
    timeout_s: float,
    max_consecutive_failures: int = 10,
  ):
    """Args:
    factories: N callables; each makes one environment, and another one in
      its place after a failure. They are called again from other threads.
    timeout_s: seconds an environment may take for one step. A new one has at
      least 30 s for its first timestep.
    max_consecutive_failures: of one environment, without a completed step
      in between, before `recv` raises RuntimeError.
    """
    if not factories:
      raise ValueError('factories (empty) must hold at least one factory')
    if not timeout_s > 0:
      raise ValueError(f'timeout_s ({timeout_s}) must be > 0 seconds')
    self._factories = list(factories)
    self._timeout_s = timeout_s
    self._failures = failures_lib.FailureLog(max_consecutive_failures)
    self._ready: queue.SimpleQueue = queue.SimpleQueue()
    self._stopped = threading.Event()
    # Made here, not in the threads: a user's mistake raises at once.
    environments = [canonical.canonicalise(f()) for f in self._factories]
    self._scalar_action = environments[0].action_spec().shape == ()
    self._buffers = buffers.TimestepBuffers(
      environments[0].observation_spec(), len(environments)
    )
    self._deadlines: dict[int, float] = {}  # Of those that owe a timestep.
    self._slots: list[_Slot] = [
      self._start(index, environment)
      for index, environment in enumerate(environments)
    ]

  def _start(
    self,
    index: int,
    environment: dm_env.Environment | None,
    back_off_s: float = 0.0,
  ) -> _Slot:
    """Starts a thread that serves environment `index`."""
    self._deadlines[index] = (
      time.monotonic()
      + back_off_s
      + max(self._timeout_s, _MIN_RESTART_TIMEOUT_S)
    )
    slot = _Slot(index, self._ready)
    threading.Thread(
      target=_serve,
      args=(
        slot,
        self._factories[index],
        environment,
        back_off_s,
        self._stopped,
      ),
      name=f'environment_{index}',
      daemon=True,
    ).start()
    return slot

  @property
  def num_environments(self) -> int:
    return len(self._factories)

  @property
  def failures(self) -> Mapping[str, int]:
    """Failures so far by cause: 'error' and 'timeout'."""
    return self._failures.counts

  def recv(self, timeout_s: float) -> tuple[np.ndarray, dm_env.TimeStep] | None:
    deadline = time.monotonic() + timeout_s
    ids: list[int] = []
    timesteps: list[tuple] = []
    while not self._stopped.is_set():
      now = time.monotonic()
      self._replace_overdue(now)
      wake_up = min([deadline, *self._deadlines.values()])
      slot_message = self._get(max(0.0, wake_up - now))
      self._accept(slot_message, ids, timesteps)
      if ids:
        deadline = time.monotonic() + min(_JOIN_S, timeout_s)
        break
      if slot_message is None and time.monotonic() >= deadline:
        return None
    while self._deadlines and not self._stopped.is_set():
      slot_message = self._get(max(0.0, deadline - time.monotonic()))
      if slot_message is None:
        break
      self._accept(slot_message, ids, timesteps)
    if not ids:
      return None
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return (
      np.array(sorted(ids), np.int32),
      self._buffers.write(*zip(*(timesteps[i] for i in order))),
    )

  def _get(self, timeout_s: float) -> tuple[_Slot, Any] | None:
    try:
      return self._ready.get(timeout=timeout_s)
    except queue.Empty:
      return None

  def _accept(
    self,
    message: tuple[_Slot, Any] | None,
    ids: list[int],
    timesteps: list[tuple],
  ) -> None:
    """Takes one thread's answer; ignores those that were replaced."""
    if message is None:
      return
    slot, answer = message
    index = slot.index
    if self._slots[index] is not slot:
      return
    if isinstance(answer, BaseException):
      self._replace(index, 'error', answer)
      return
    del self._deadlines[index]
    step_type = answer[0]
    self._failures.succeeded(index, step_type)
    ids.append(index)
    timesteps.append(answer)

  def _replace_overdue(self, now: float) -> None:
    overdue = [i for i, deadline in self._deadlines.items() if deadline <= now]
    for index in overdue:
      self._replace(
        index,
        'timeout',
        TimeoutError(
          f'environment {index} did not answer in time (timeout_s is '
          f'{self._timeout_s})'
        ),
      )

  def _replace(self, index: int, cause: str, error: BaseException) -> None:
    """Leaves the thread of environment `index` and starts another."""
    self._slots[index].inbox.put(_STOP)
    in_a_row = self._failures.record(index, cause, error)
    # The first retry is at once; then doubling, for services that are down.
    back_off_s = (
      min(_FIRST_BACK_OFF_S * 2 ** (in_a_row - 2), _MAX_BACK_OFF_S)
      if in_a_row > 1
      else 0.0
    )
    self._slots[index] = self._start(index, None, back_off_s)

  def send(self, action: types.Nest, environment_ids: np.ndarray) -> None:
    if self._stopped.is_set():
      raise RuntimeError('send() was called after close()')
    ids = environment_ids.tolist()
    if not self._deadlines.keys().isdisjoint(ids):
      raise ValueError(
        f'environment_ids ({ids}) must have come from recv() since they '
        'were last sent'
      )
    action = np.asarray(action)
    # A copy: threads read it while the caller may reuse the array.
    actions = action.tolist() if self._scalar_action else list(action.copy())
    if len(actions) != len(ids):
      raise ValueError(
        f'action (leading dim {len(actions)}) must have one row for each of '
        f'the {len(ids)} environment_ids'
      )
    deadline = time.monotonic() + self._timeout_s
    for index, one in zip(ids, actions):
      self._deadlines[index] = deadline
      self._slots[index].inbox.put(one)

  def close(self) -> None:
    """Ends the threads; those in a call that hangs are left behind."""
    if self._stopped.is_set():
      return
    self._stopped.set()
    for slot in self._slots:
      slot.inbox.put(_STOP)
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    for slot in self._slots:
      slot.ended.wait(max(0.0, deadline - time.monotonic()))


class _Slot:
  """One thread's end of the conversation.

  Attributes:
    index: the environment's id.
    inbox: actions for the thread, or `_STOP`.
    ended: set when the thread has closed its environment.
  """

  def __init__(self, index: int, ready: queue.SimpleQueue):
    self.index = index
    self.inbox: queue.SimpleQueue = queue.SimpleQueue()
    self.ended = threading.Event()
    self._ready = ready

  def answer(self, timestep_or_error: Any) -> None:
    """Hands a timestep, or what was raised, to the receiving side."""
    self._ready.put((self, timestep_or_error))


def _serve(
  slot: _Slot,
  factory: Callable[[], dm_env.Environment],
  environment: dm_env.Environment | None,
  back_off_s: float,
  stopped: threading.Event,
) -> None:
  """A thread's life: make the environment, then answer each action."""
  try:
    if environment is None:
      if stopped.wait(back_off_s):
        return
      environment = canonical.canonicalise(factory())
    timestep = environment.reset()
    while True:
      slot.answer(timestep)
      # Waits for the policy without a deadline; close() and replacement end
      # it with _STOP.
      action = slot.inbox.get()
      if action is _STOP:
        return
      if timestep[0] == dm_env.StepType.LAST:
        timestep = environment.reset()
      else:
        timestep = environment.step_raw(action)
  except BaseException as e:  # pylint: disable=broad-except
    slot.answer(e)  # Also SystemExit: one environment may not end the process.
  finally:
    try:
      if environment is not None:
        environment.close()
    except Exception as e:  # pylint: disable=broad-except
      logging.warning('environment %d failed to close: %r', slot.index, e)
    slot.ended.set()
