"""The canonical form: actions, observations, refusals."""

import unittest

import dm_env
from dm_env import specs
from dm_env import test_utils
import numpy as np
import pytest

fakes = pytest.importorskip('fakes', reason='gymnasium is missing')

from tunix_reverb import errors  # noqa: E402
from tunix_reverb.environments import canonical  # noqa: E402
from tunix_reverb.environments import catch  # noqa: E402


class CounterTest(test_utils.EnvironmentTestMixin, unittest.TestCase):
  def make_object_under_test(self):
    return canonical.canonicalise(fakes.Counter())


class NestedTest(test_utils.EnvironmentTestMixin, unittest.TestCase):
  def make_object_under_test(self):
    return canonical.canonicalise(fakes.Nested())


def test_nests_become_plain_dicts_and_tuples():
  environment = canonical.canonicalise(fakes.Nested())
  for nest in (environment.observation_spec(), environment.reset().observation):
    assert type(nest) is dict
    assert type(nest['z']) is tuple
  spec = environment.observation_spec()
  assert [s.dtype for s in (*spec['z'], spec['a'])] == [
    np.float32, np.bool_, np.uint8,
  ]  # fmt: skip
  assert spec['z'][0].name == 'observation/z/0'


def test_a_canonical_environment_is_left_alone():
  environment = catch.Catch(seed=0)
  assert canonical.canonicalise(environment) is environment
  wrapped = canonical.canonicalise(fakes.Counter())
  assert canonical.canonicalise(wrapped) is wrapped


@pytest.mark.parametrize(
  ('own', 'ours', 'theirs'),
  [
    (specs.DiscreteArray(3, np.int64), 2, np.int64(2)),
    (specs.BoundedArray((), np.int32, 5, 7), 1, np.int32(6)),
    (specs.BoundedArray((), np.bool_, False, True), 1, np.bool_(True)),
    (specs.BoundedArray((2,), np.int8, [1, 2], 9), [0, 7], [1, 9]),
    (specs.BoundedArray((2,), np.float64, [-3, 0], [3, 10]), [0.5, -2.0],
     [1.5, 0.0]),
    (specs.BoundedArray((), np.float32, 0, 4), [0.0], 2.0),
    (specs.BoundedArray((2,), np.float32, [-np.inf, -1], [np.inf, 1]),
     [50.0, 50.0], [50.0, 1.0]),
    (specs.Array((2,), np.float32), [50.0, -7.0], [50.0, -7.0]),
    (specs.BoundedArray((1,), np.float64, np.finfo(np.float64).min,
                        np.finfo(np.float64).max), [5.0], [5.0]),
  ],
)  # fmt: skip
def test_actions_are_mapped_to_the_environments_own(own, ours, theirs):
  action_map = canonical.ActionMap(own)
  ours = np.asarray(ours, action_map.spec.dtype)
  assert ours.shape == action_map.spec.shape
  actual = action_map(ours)
  own.validate(actual)
  np.testing.assert_allclose(actual, theirs)
  # A batch of actions maps like its rows.
  batch = action_map(np.stack([ours] * 3))
  assert batch.shape == (3, *own.shape)
  assert batch.dtype == own.dtype
  np.testing.assert_allclose(batch[2], theirs)


def test_bounds_are_reached_and_never_left():
  own = specs.BoundedArray((1,), np.float32, -0.1, 0.7)
  action_map = canonical.ActionMap(own)
  for action in (-1.0, 1.0, 1e9, -1e9):
    own.validate(action_map(np.array([action], np.float32)))
  np.testing.assert_array_equal(action_map(np.ones(1)), own.maximum)
  np.testing.assert_array_equal(action_map(-np.ones(1)), own.minimum)


def test_strict_environments_get_their_own_dtype_on_both_paths():
  # `Counter.step` validates the action against an int64 spec.
  environment = canonical.canonicalise(fakes.Counter())
  environment.reset()
  environment.step(np.int32(3))
  step_type, _, _, _ = environment.step_raw(3)
  assert step_type == dm_env.StepType.MID


@pytest.mark.parametrize(
  ('own', 'text'),
  [
    ({'a': specs.DiscreteArray(2)}, 'must be one array of numbers'),
    (specs.Array((), np.int32), 'must bound its integers'),
    (specs.StringArray(()), 'must be one array of numbers'),
  ],
)
def test_actions_without_a_canonical_form_are_refused(own, text):
  with pytest.raises(errors.UserError, match=text):
    canonical.ActionMap(own)


def test_observations_of_strings_are_refused_by_name():
  spec = {'a': {'b': specs.StringArray(())}}
  with pytest.raises(errors.UserError, match='observation/a/b'):
    canonical.canonical_spec(spec)
