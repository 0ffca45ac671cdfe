"""Vector environments: the contract, failures, slow and hanging ones."""

import functools
import threading
import time
import unittest

import dm_env
import numpy as np
import pytest

fakes = pytest.importorskip('fakes', reason='gymnasium is missing')

from tunix_reverb import specs as specs_lib  # noqa: E402
from tunix_reverb.environments import asynchronous  # noqa: E402
from tunix_reverb.environments import canonical  # noqa: E402
from tunix_reverb.environments import catch  # noqa: E402
from tunix_reverb.environments import factory  # noqa: E402
from tunix_reverb.environments import test_utils  # noqa: E402
from tunix_reverb.environments import vector  # noqa: E402

FIRST, MID, LAST = (int(s) for s in dm_env.StepType)


class _OwnTest(test_utils.VectorEnvironmentTestMixin):
  """With `make_one()` for each of 3 environments."""

  mode = 'vectorised'
  make_one = functools.partial(catch.Catch, seed=0)

  def make_object_under_test(self):
    if self.mode == 'vectorised':
      return vector.SynchronousVectorEnvironment([self.make_one] * 3)
    return vector.AsynchronousVectorEnvironment(
      [self.make_one] * 3, timeout_s=20.0
    )

  def make_spec(self):
    return specs_lib.make_environment_spec(
      canonical.canonicalise(self.make_one())
    )


class SynchronousCatchTest(_OwnTest, unittest.TestCase):
  pass


class SynchronousNestedTest(_OwnTest, unittest.TestCase):
  make_one = functools.partial(fakes.Nested)


class AsynchronousCatchTest(_OwnTest, unittest.TestCase):
  mode = 'asynchronous'


class AsynchronousNestedTest(_OwnTest, unittest.TestCase):
  mode = 'asynchronous'
  make_one = functools.partial(fakes.Nested)


class _NamedTest(test_utils.VectorEnvironmentTestMixin):
  """With environments made by name."""

  name = ''
  mode = 'vectorised'

  def make_object_under_test(self):
    return factory.make_vector(
      self.name, num_environments=3, seed=1, mode=self.mode
    )

  def make_spec(self):
    return factory.environment_spec(self.name)


class CartPoleTest(_NamedTest, unittest.TestCase):
  name = 'gym:CartPole-v1'


class PendulumTest(_NamedTest, unittest.TestCase):
  name = 'gym:Pendulum-v1'
  num_recvs = 210


class AsynchronousCartPoleTest(_NamedTest, unittest.TestCase):
  name = 'gym:CartPole-v1'
  mode = 'asynchronous'
  num_recvs = 200


class BlackjackTest(_NamedTest, unittest.TestCase):
  name = 'gym:Blackjack-v1'


def _synchronous(make_one, num=1, **kwargs):
  return vector.SynchronousVectorEnvironment([make_one] * num, **kwargs)


def _send(environment, ids, action=0):
  environment.send(np.full(len(ids), action, np.int32), ids)


def _rows(environment, num_recvs):
  """(ids, step_types, rewards, discounts, counts) of each recv."""
  rows = []
  for _ in range(num_recvs):
    ids, timestep = environment.recv(20.0)
    rows.append(
      (
        ids.tolist(),
        *(getattr(timestep, f).tolist() for f in timestep._fields[:3]),
        timestep.observation[:, 0].tolist(),
      )
    )
    _send(environment, ids)
  return rows


@pytest.mark.parametrize('mode', ['vectorised', 'asynchronous'])
@pytest.mark.parametrize('last_discount', [0.0, 1.0, 0.5])
def test_golden_timeline(mode, last_discount):
  make_one = functools.partial(
    fakes.Counter, length=2, last_discount=last_discount
  )
  if mode == 'vectorised':
    environment = _synchronous(make_one)
  else:
    environment = vector.AsynchronousVectorEnvironment(
      [make_one], timeout_s=20.0
    )
  assert _rows(environment, 5) == [
    ([0], [FIRST], [0.0], [1.0], [0.0]),
    ([0], [MID], [1.0], [1.0], [1.0]),
    ([0], [LAST], [2.0], [last_discount], [2.0]),
    ([0], [FIRST], [0.0], [1.0], [0.0]),
    ([0], [MID], [1.0], [1.0], [1.0]),
  ]
  environment.close()


def test_parts_may_be_sent_in_any_order():
  environment = _synchronous(fakes.Counter, num=3)
  environment.recv(1.0)
  _send(environment, np.array([2], np.int32))
  ids, timestep = environment.recv(1.0)
  assert (ids.tolist(), timestep.step_type.tolist()) == ([2], [MID])
  _send(environment, np.array([2, 0], np.int32))
  _send(environment, np.array([1], np.int32))
  ids, timestep = environment.recv(1.0)
  assert ids.tolist() == [2, 0, 1]
  assert timestep.observation[:, 0].tolist() == [2.0, 1.0, 1.0]


def test_arrays_stay_valid_until_the_next_recv():
  environment = _synchronous(fakes.Counter, num=2)
  ids, timestep = environment.recv(1.0)
  _send(environment, ids)
  assert timestep.observation[:, 0].tolist() == [0.0, 0.0]


def test_an_observation_of_the_wrong_shape_is_named():
  class Ragged(fakes.Counter):
    def _observation(self):
      return np.zeros(3)

  with pytest.raises(ValueError, match=r'float32\[2\].*float32\[3\]'):
    _synchronous(Ragged, num=2).recv(1.0)


def test_an_observation_of_the_wrong_kind_is_named():
  class Fractions(fakes.Nested):
    def step(self, action):
      timestep = super().step(action)
      fractions = np.full((2, 3), 0.5)
      return timestep._replace(
        observation={**timestep.observation, 'a': fractions}
      )

  environment = _synchronous(Fractions)
  _send(environment, environment.recv(1.0)[0])
  with pytest.raises(ValueError, match=r'observation/a.*uint8.*float64\[2, 3'):
    environment.recv(1.0)


# Failures.


def _every_other(makes):
  """A factory that calls `makes` in turn, the last one for ever."""
  made = []

  def make():
    made.append(makes[min(len(made), len(makes) - 1)]())
    return made[-1]

  return make, made


@pytest.mark.parametrize('mode', ['vectorised', 'asynchronous'])
def test_one_that_raises_is_replaced_and_its_episode_cut(mode):
  make, made = _every_other([functools.partial(fakes.Raising, at=2),
                             fakes.Counter])  # fmt: skip
  factories = [fakes.Counter, make]
  if mode == 'vectorised':
    environment = vector.SynchronousVectorEnvironment(factories)
  else:
    environment = vector.AsynchronousVectorEnvironment(
      factories, timeout_s=20.0
    )
  steps = []
  while len(steps) < 5:
    ids, timestep = environment.recv(20.0)
    steps += timestep.step_type[ids == 1].tolist()
    _send(environment, ids)
  assert steps[:4] == [FIRST, MID, FIRST, MID]
  assert environment.failures == {'error': 1, 'timeout': 0}
  environment.close()
  assert [e.closed for e in made] == [True, True]


@pytest.mark.parametrize('mode', ['vectorised', 'asynchronous'])
def test_one_that_always_raises_ends_the_run_with_its_cause(mode, monkeypatch):
  monkeypatch.setattr(asynchronous, '_FIRST_BACK_OFF_S', 0.001)
  make_one = functools.partial(fakes.Raising, at=1)
  if mode == 'vectorised':
    environment = _synchronous(make_one, max_consecutive_failures=3)
  else:
    environment = vector.AsynchronousVectorEnvironment(
      [make_one], timeout_s=20.0, max_consecutive_failures=3
    )
  with pytest.raises(RuntimeError, match='environment 0 failed 4 times') as e:
    for _ in range(20):
      ids, _ = environment.recv(20.0)
      _send(environment, ids)
  assert 'broken on purpose' in str(e.value.__cause__)
  environment.close()


def test_a_factory_that_fails_counts_as_a_failure():
  def broken():
    raise OSError('no simulator')

  make, _ = _every_other([functools.partial(fakes.Raising, at=1), broken])
  environment = _synchronous(make, max_consecutive_failures=2)
  ids, _ = environment.recv(1.0)
  _send(environment, ids)
  with pytest.raises(RuntimeError, match='no simulator'):
    environment.recv(1.0)


def test_a_completed_step_clears_the_count():
  # Each instance fails at its second step: never twice in a row.
  environment = _synchronous(
    functools.partial(fakes.Raising, at=2), max_consecutive_failures=1
  )
  for _ in range(20):
    ids, _ = environment.recv(1.0)
    _send(environment, ids)
  assert environment.failures['error'] > 5


def test_only_the_one_that_raised_loses_its_step():
  environment = vector.SynchronousVectorEnvironment(
    [fakes.Counter, functools.partial(fakes.Raising, at=1), fakes.Counter]
  )
  ids, _ = environment.recv(1.0)
  _send(environment, ids)
  _, timestep = environment.recv(1.0)
  assert timestep.step_type.tolist() == [MID, FIRST, MID]
  assert environment.failures['error'] == 1


def test_an_environment_may_reset_itself():
  class Resetting(fakes.Counter):
    def step(self, action):
      return self.reset() if self._count == 1 else super().step(action)

  environment = _synchronous(Resetting)
  rows = _rows(environment, 3)
  assert [row[1] for row in rows] == [[FIRST], [MID], [FIRST]]


# The asynchronous one.


def test_a_slow_environment_holds_up_nobody():
  gate = threading.Event()
  environment = vector.AsynchronousVectorEnvironment(
    [functools.partial(fakes.Blocking, gate), fakes.Counter], timeout_s=20.0
  )
  answered = {0: 0, 1: 0}
  while answered[1] < 10:
    ids, _ = environment.recv(20.0)
    for i in ids.tolist():
      answered[i] += 1
    _send(environment, ids)
  assert answered[0] == 1  # Its FIRST.
  gate.set()
  while answered[0] < 2:
    ids, _ = environment.recv(20.0)
    for i in ids.tolist():
      answered[i] += 1
    _send(environment, ids)
  environment.close()


def test_recv_times_out_while_all_are_slow():
  gate = threading.Event()
  environment = vector.AsynchronousVectorEnvironment(
    [functools.partial(fakes.Blocking, gate)], timeout_s=20.0
  )
  ids, _ = environment.recv(20.0)
  _send(environment, ids)
  start = time.monotonic()
  assert environment.recv(0.1) is None
  assert 0.09 < time.monotonic() - start < 5.0
  gate.set()
  assert environment.recv(20.0)[1].step_type.tolist() == [MID]
  environment.close()


def test_a_hanging_environment_is_replaced_and_its_late_answer_ignored():
  gate = threading.Event()
  make, made = _every_other(
    [functools.partial(fakes.Blocking, gate), fakes.Counter]
  )
  environment = vector.AsynchronousVectorEnvironment([make], timeout_s=0.2)
  ids, _ = environment.recv(20.0)
  _send(environment, ids)
  ids, timestep = environment.recv(20.0)
  assert timestep.step_type.tolist() == [FIRST]
  assert environment.failures == {'error': 0, 'timeout': 1}
  gate.set()
  deadline = time.monotonic() + 20.0
  while not made[0].closed and time.monotonic() < deadline:
    time.sleep(0.005)
  assert made[0].closed
  assert environment.recv(0.05) is None  # The late answer reaches nobody.
  _send(environment, ids)
  assert environment.recv(20.0)[1].step_type.tolist() == [MID]
  environment.close()


def test_one_that_exits_the_interpreter_is_only_an_error():
  make, _ = _every_other(
    [functools.partial(fakes.Raising, at=1, error=SystemExit), fakes.Counter]
  )
  environment = vector.AsynchronousVectorEnvironment([make], timeout_s=20.0)
  ids, _ = environment.recv(20.0)
  _send(environment, ids)
  assert environment.recv(20.0)[1].step_type.tolist() == [FIRST]
  assert environment.failures['error'] == 1
  environment.close()


@pytest.mark.parametrize('mode', ['vectorised', 'asynchronous'])
def test_close_does_not_wait_for_a_hanging_environment(mode, monkeypatch):
  monkeypatch.setattr(asynchronous, '_CLOSE_TIMEOUT_S', 0.2)
  monkeypatch.setattr(vector, '_CLOSE_TIMEOUT_S', 0.2)
  gate = threading.Event()

  class HangsAtClose(fakes.Counter):
    def close(self):
      gate.wait(30.0)

  if mode == 'vectorised':
    environment = _synchronous(HangsAtClose)
  else:
    environment = vector.AsynchronousVectorEnvironment(
      [HangsAtClose], timeout_s=20.0
    )
  environment.recv(20.0)
  start = time.monotonic()
  environment.close()
  assert time.monotonic() - start < 5.0
  gate.set()
