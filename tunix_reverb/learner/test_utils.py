"""The contract of `core.Learner`, as tests to inherit.

Inherit the mixin, implement its hooks, and pytest runs the contract. Not
imported by the library.
"""

from __future__ import annotations

import abc

import jax
import numpy as np

from tunix_reverb import core
from tunix_reverb import types


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
