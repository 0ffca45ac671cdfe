"""Our adders keep the contracts of `core.Adder` and `core.VectorAdder`."""

import numpy as np
import tree

from tunix_reverb import core
from tunix_reverb.replay import adder as adder_lib
from tunix_reverb.replay import adder_test_utils
from tunix_reverb.replay import test_utils


class _ListWriter(core.ItemWriter):
  def __init__(self):
    self.items = []

  def write(self, trajectories, timeout_s=None):
    self.items.append(tree.map_structure(np.copy, trajectories))
    return True

  def blocked_s(self):
    return 0.0

  def close(self, timeout_s):
    return True


def _adder(writer, trajectory_length, num_environments, item_transitions):
  return adder_lib.TrajectoryAdder(
    columns=test_utils.columns(),
    num_environments=num_environments,
    trajectory_length=trajectory_length,
    writer=writer,
    actor_id=0,
    item_transitions=item_transitions,
    item_age_s=1e9,
  )


class TestEnvironmentAdder(adder_test_utils.AdderContract):
  def make_adder(self, trajectory_length):
    self._writer = _ListWriter()
    return adder_lib.EnvironmentAdder(
      _adder(self._writer, trajectory_length, 1, 10_000),
      core_state=(np.zeros(2, np.float32),),
    )

  def written(self, adder):
    adder.flush()
    return self._writer.items


class TestTrajectoryAdder(adder_test_utils.VectorAdderContract):
  item_transitions = 10_000

  def make_adder(self, trajectory_length, num_environments):
    self._writer = _ListWriter()
    return _adder(
      self._writer, trajectory_length, num_environments, self.item_transitions
    )

  def written(self):
    return self._writer.items


class TestTrajectoryAdderOfSingleTrajectories(TestTrajectoryAdder):
  item_transitions = 1
