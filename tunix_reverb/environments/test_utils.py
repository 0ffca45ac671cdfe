"""The contract of `core.VectorEnvironment`, as tests to inherit.

As in `dm_env.test_utils`: inherit from the mixin and `unittest.TestCase` (in
this order) and override `make_object_under_test` and `make_spec`.
"""

from __future__ import annotations

import time
from typing import Any

import dm_env
from dm_env import specs
import numpy as np

from tunix_reverb import core
from tunix_reverb import specs as specs_lib
from tunix_reverb import types
from tunix_reverb.environments import check

_FIRST, _MID, _LAST = (int(s) for s in dm_env.StepType)
_RECV_TIMEOUT_S = 20.0
_CLOSE_LIMIT_S = 10.0


class VectorEnvironmentTestMixin:
  """Checks an implementation of `core.VectorEnvironment`.

  Attributes:
    num_recvs: calls of `recv` in the long tests; enough for every environment
      to finish an episode if `reaches_last`.
    reaches_last: whether they do.
  """

  num_recvs = 100
  reaches_last = True

  def make_object_under_test(self) -> core.VectorEnvironment:
    """A fresh vector environment, of at least two environments."""
    raise NotImplementedError

  def make_spec(self) -> specs_lib.EnvironmentSpec:
    """The canonical specs of one of its environments."""
    raise NotImplementedError

  def setUp(self) -> None:
    super().setUp()
    self.vector = self.make_object_under_test()
    self.addCleanup(self.vector.close)
    self.spec = self.make_spec()
    self.generator = np.random.default_rng(0)

  def recv(self) -> tuple[np.ndarray, dm_env.TimeStep]:
    """`recv` with a deadline, checked against the specs."""
    received = self.vector.recv(_RECV_TIMEOUT_S)
    self.assertIsNotNone(received, 'nothing came back')
    self.assert_valid(*received)
    return received

  def send(self, environment_ids: np.ndarray) -> None:
    """Sends random actions."""
    self.vector.send(
      check.sample_action(
        self.spec.action, self.generator, len(environment_ids)
      ),
      environment_ids,
    )

  def assert_valid(self, ids: np.ndarray, timestep: dm_env.TimeStep) -> None:
    """Shapes, dtypes and values of one `recv`."""
    num = len(ids)
    self.assertEqual(ids.dtype, np.int32)
    self.assertTrue(1 <= num <= self.vector.num_environments)
    self.assertEqual(len(set(ids.tolist())), num, 'an id came twice')
    self.assertTrue(np.all((ids >= 0) & (ids < self.vector.num_environments)))
    for name, dtype in (
      ('step_type', np.int32),
      ('reward', np.float32),
      ('discount', np.float32),
    ):
      array = getattr(timestep, name)
      self.assertEqual((array.shape, array.dtype), ((num,), dtype), name)
    self.assertTrue(np.isin(timestep.step_type, [_FIRST, _MID, _LAST]).all())
    self.assertTrue(np.isfinite(timestep.reward).all())
    self.assertTrue(np.all((timestep.discount >= 0) & (timestep.discount <= 1)))
    first = timestep.step_type == _FIRST
    np.testing.assert_array_equal(timestep.reward[first], 0.0)
    np.testing.assert_array_equal(timestep.discount[first], 1.0)
    self._assert_observation(timestep.observation, self.spec.observation, num)

  def _assert_observation(
    self, value: types.Nest, spec: types.Nest, num: int
  ) -> None:
    self.assertIs(type(value), np.ndarray if _is_leaf(spec) else type(spec))
    if isinstance(spec, dict):
      self.assertEqual(value.keys(), spec.keys())
      for key in spec:
        self._assert_observation(value[key], spec[key], num)
    elif isinstance(spec, tuple):
      self.assertEqual(len(value), len(spec))
      for one_value, one_spec in zip(value, spec):
        self._assert_observation(one_value, one_spec, num)
    else:
      self.assertEqual(value.shape, (num, *spec.shape))
      self.assertEqual(value.dtype, spec.dtype)
      for row in value:
        spec.validate(row)

  # Test cases

  def test_starts_with_first(self):
    """Every environment's first timestep is FIRST."""
    seen = set()
    while len(seen) < self.vector.num_environments:
      ids, timestep = self.recv()
      new = [i not in seen for i in ids]
      np.testing.assert_array_equal(timestep.step_type[new], _FIRST)
      seen |= set(ids.tolist())
      self.send(ids)

  def test_first_comes_after_last_only(self):
    """The order of step types, for each environment."""
    num = self.vector.num_environments
    previous, episodes = np.full(num, _LAST), np.zeros(num)
    for _ in range(self.num_recvs):
      ids, timestep = self.recv()
      np.testing.assert_array_equal(
        timestep.step_type == _FIRST, previous[ids] == _LAST
      )
      previous[ids] = timestep.step_type
      episodes[ids] += timestep.step_type == _LAST
      self.send(ids)
    if self.reaches_last:
      self.assertGreater(episodes.min(), 0, 'num_recvs is too small')

  def test_returns_only_what_was_sent_to(self):
    """An environment answers once for each action."""
    owed = set(range(self.vector.num_environments))
    for _ in range(self.num_recvs):
      ids, _ = self.recv()
      self.assertLessEqual(set(ids.tolist()), owed)
      owed -= set(ids.tolist())
      self.send(ids)
      owed |= set(ids.tolist())

  def test_recv_with_nothing_sent_returns_none(self):
    """And within its timeout."""
    received = 0
    while received < self.vector.num_environments:
      received += len(self.recv()[0])
    start = time.monotonic()
    self.assertIsNone(self.vector.recv(0.05))
    self.assertLess(time.monotonic() - start, 5.0)

  def test_sending_twice_is_refused(self):
    """Before the answer to the first has been received."""
    ids, _ = self.recv()
    ids = ids.copy()
    self.send(ids)
    with self.assertRaises(ValueError):
      self.send(ids)

  def test_close_is_idempotent_and_prompt(self):
    """Also with actions under way; nothing is received afterwards."""
    ids, _ = self.recv()
    self.send(ids)
    start = time.monotonic()
    self.vector.close()
    self.vector.close()
    self.assertLess(time.monotonic() - start, _CLOSE_LIMIT_S)
    self.assertIsNone(self.vector.recv(0.05))
    with self.assertRaises(RuntimeError):
      self.send(ids)

  def test_nothing_fails(self):
    """No environment is replaced that keeps its contract."""
    for _ in range(self.num_recvs):
      self.send(self.recv()[0])
    self.assertEqual(set(self.vector.failures.values()), {0})


def _is_leaf(spec: Any) -> bool:
  return isinstance(spec, specs.Array)
