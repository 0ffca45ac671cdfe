"""The staleness bound: which trajectories may reach an update.

`policy_lag` is the learner's version minus a trajectory's minimum
`policy_version`, in publishes. Letters: N trajectories.
"""

from __future__ import annotations

import dataclasses

import numpy as np

# Causes of a drop, by the code that `causes` returns; 0 is fresh.
FRESH, LAG, AGE = 0, 1, 2
CAUSES = {LAG: 'lag', AGE: 'age'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessBound:
  """The largest lag and age at which a trajectory is still learnt.

  Attributes:
    max_policy_lag: in publishes of the learner.
    max_age_s: seconds since the trajectory's first action.
  """

  max_policy_lag: int
  max_age_s: float

  def causes(
    self,
    policy_version: np.ndarray,
    created_at_s: np.ndarray,
    *,
    learner_version: int,
    now_s: float,
  ) -> np.ndarray:
    """Why each trajectory is too old: int8 [N] of FRESH, LAG or AGE.

    Args:
      policy_version: i32 [N], minimum version of each trajectory.
      created_at_s: f64 [N], wall-clock seconds.
      learner_version: version the learner published last.
      now_s: wall-clock seconds.
    """
    causes = np.where(now_s - created_at_s > self.max_age_s, AGE, FRESH)
    lagged = learner_version - policy_version > self.max_policy_lag
    return np.where(lagged, LAG, causes).astype(np.int8)
