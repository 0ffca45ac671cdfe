"""The staleness bound at its edges."""

import numpy as np

from tunix_reverb.staleness import bound as bound_lib


def test_edges_and_precedence():
  bound = bound_lib.StalenessBound(max_policy_lag=2, max_age_s=10.0)
  causes = bound.causes(
    np.array([8, 7, 8, 7], np.int32),
    np.array([90.0, 90.0, 89.9, 0.0]),
    learner_version=10,
    now_s=100.0,
  )
  assert causes.tolist() == [
    bound_lib.FRESH,  # Exactly at both bounds.
    bound_lib.LAG,
    bound_lib.AGE,
    bound_lib.LAG,  # Too old in both ways counts once, as lag.
  ]


def test_zero_lag_keeps_the_current_version_only():
  bound = bound_lib.StalenessBound(max_policy_lag=0, max_age_s=10.0)
  causes = bound.causes(
    np.array([4, 5], np.int32), np.zeros(2), learner_version=5, now_s=1.0
  )
  assert causes.tolist() == [bound_lib.LAG, bound_lib.FRESH]
