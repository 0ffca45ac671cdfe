"""The contract of `core.Learner`, as tests to inherit.

Inherit the mixin, implement its hooks, and pytest runs the contract. Also
holds small trajectories for tests. Not imported by the library.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
import time

from dm_env import specs as dm_specs
import jax
import numpy as np

from tunix_reverb import core
from tunix_reverb import specs
from tunix_reverb import types

SPEC = specs.EnvironmentSpec(
  observation=dm_specs.Array((2,), np.float32),
  action=dm_specs.DiscreteArray(3),
  reward=dm_specs.Array((), np.float32),
  discount=dm_specs.BoundedArray((), np.float32, 0, 1),
)


def trajectories(
  lengths: Sequence[int],
  *,
  policy_version: int | Sequence[int] = 1,
  age_s: float | Sequence[float] = 0.0,
  permit_id: int | Sequence[int] = 0,
  seed: int = 0,
) -> types.Trajectories:
  """An item of random trajectories of an environment with `SPEC`.

  Args:
    lengths: transitions of each, [N].
    policy_version: of each, [N] or one for all.
    age_s: of each, seconds, [N] or one for all.
    permit_id: of each, [N] or one for all.
    seed: of observations, actions and rewards.
  """
  n, s = len(lengths), sum(lengths)
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  versions = np.broadcast_to(np.asarray(policy_version, np.int32), n)
  return types.Trajectories(
    observation=normal(s + n, 2),
    action=rng.integers(0, 3, s).astype(np.uint8),
    reward=normal(s),
    discount=np.ones(s, np.float32),
    behaviour_log_prob=np.full(s, np.log(1 / 3), np.float32),
    policy_version=np.repeat(versions, lengths),
    loss_mask=np.ones(s, np.bool_),
    core_state=(),
    lengths=np.array(lengths, np.int32),
    created_at_s=time.time() - np.broadcast_to(np.asarray(age_s, float), n),
    actor_id=np.zeros(n, np.int32),
    episode_id=np.arange(n, dtype=np.int64),
    truncated=np.zeros(n, np.bool_),
    permit_id=np.broadcast_to(np.asarray(permit_id, np.int64), n),
  )


class LearnerContract(abc.ABC):
  """What every `core.Learner` does."""

  @abc.abstractmethod
  def make_learner(self) -> core.Learner:
    """A fresh learner: the same params and the same batches every time."""

  @abc.abstractmethod
  def make_starved_learner(self) -> core.Learner:
    """A learner that no batch ever reaches."""

  def test_a_step_returns_metrics_and_changes_the_params(self):
    learner = self.make_learner()
    before = learner.get_variables()
    metrics = learner.step()
    assert metrics
    assert all(np.isfinite(float(value)) for value in metrics.values())
    assert not trees_equal(learner.get_variables(), before)

  def test_no_batch_gives_none_and_changes_nothing(self):
    learner = self.make_starved_learner()
    before = learner.save()
    assert learner.step() is None
    assert trees_equal(learner.save(), before)

  def test_run_takes_as_many_steps_as_it_is_told(self):
    ours, theirs = self.make_learner(), self.make_learner()
    ours.run(3)
    for _ in range(3):
      theirs.step()
    assert trees_equal(ours.save(), theirs.save())

  def test_variables_are_asked_for_by_name_and_do_not_change_later(self):
    learner = self.make_learner()
    (params,) = learner.get_variables(['params'])
    kept = jax.tree_util.tree_map(np.copy, params)
    assert trees_equal(learner.get_variables(), [params])
    learner.step()
    assert trees_equal(params, kept)
    try:
      learner.get_variables(['no such thing'])
    except ValueError as e:
      assert 'no such thing' in str(e) and 'params' in str(e)
    else:
      raise AssertionError('an unknown name was accepted')

  def test_a_restored_learner_goes_on_bit_for_bit(self):
    ours, theirs = self.make_learner(), self.make_learner()
    ours.run(2)
    saved = ours.save()
    kept = jax.tree_util.tree_map(np.copy, saved)
    theirs.run(1)  # Elsewhere, ...
    theirs.step()  # ... and at the same place among the batches.
    theirs.restore(self.make_learner().save())
    assert not trees_equal(theirs.save(), saved)
    theirs.restore(saved)
    assert trees_equal(theirs.save(), saved)
    ours.step()
    theirs.step()
    assert trees_equal(ours.save(), theirs.save())
    assert trees_equal(saved, kept), 'a saved state changed with the learner'


def trees_equal(ours: types.Nest, theirs: types.Nest) -> bool:
  """Same structure, dtypes, shapes and bytes."""
  left, left_tree = jax.tree_util.tree_flatten(ours)
  right, right_tree = jax.tree_util.tree_flatten(theirs)
  return left_tree == right_tree and all(
    np.asarray(a).dtype == np.asarray(b).dtype
    and np.asarray(a).shape == np.asarray(b).shape
    and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for a, b in zip(left, right)
  )
