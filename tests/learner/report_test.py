"""The learner's report: what was learnt, how old it was, what was dropped."""

import time

import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb.batching import buckets as buckets_lib
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.learner import report as report_lib
from tunix_reverb.learner import test_utils
from tunix_reverb.telemetry import drops as drops_lib
from tunix_reverb.telemetry import metrics
from tunix_reverb.telemetry import timing


def _packed(**kwargs):
  packer = packer_lib.Packer(
    buckets=buckets_lib.make_buckets((8,), batch_positions=16),
    columns=specs.trajectories_spec(test_utils.SPEC),
    window=1.0,
  )
  packer.add(test_utils.trajectories([3, 7], **kwargs))
  return packer.pop(flush=True)


def _report():
  drops = drops_lib.DropCounter(metrics.DROP_CAUSES)
  account = timing.TimeAccount('compute', 'waiting', 'publishing')
  return report_lib.LearnerReport(drops, account), drops, account


def test_lags_ages_and_fill_are_those_of_what_was_handed_over():
  report, _, _ = _report()
  report.add(_packed(policy_version=[4, 9], age_s=[2.0, 6.0]), 10, time.time())
  values = report.take()
  assert values['policy_lag_mean'] == 3.5
  assert values['policy_lag_max'] == 6
  assert values['age_s_mean'] == pytest.approx(4.0, abs=0.5)
  assert values['age_s_max'] == pytest.approx(6.0, abs=0.5)
  assert values['batch_fill'] == (4 + 8) / 16
  assert values['transitions_total'] == 10
  assert values['learner_steps_per_s'] > 0
  assert values['transitions_per_s'] == pytest.approx(
    10 * values['learner_steps_per_s'], rel=0.1
  )


def test_a_window_starts_over_and_totals_go_on():
  report, _, _ = _report()
  report.add(_packed(), 10, time.time())
  report.take()
  values = report.take()
  assert values['learner_steps_per_s'] == values['transitions_per_s'] == 0
  assert values['transitions_total'] == 10
  assert not [name for name in values if name.startswith('policy_lag')]
  assert 'batch_fill' not in values


def test_drops_are_reported_by_cause_and_by_decile():
  report, drops, _ = _report()
  drops.see(np.arange(1, 11, dtype=np.int32))
  drops.drop('age', np.array([9, 10], np.int32))
  drops.drop('lag', np.array([1], np.int32))
  values = report.take()
  assert values['dropped_age_total'] == 2
  assert values['dropped_lag_total'] == 1
  assert values['dropped_poison_total'] == 0
  deciles = [values[f'dropped_decile_{i}_total'] for i in range(10)]
  assert deciles == [1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
  assert report.drops().items() <= values.items()


def test_every_name_is_listed_and_the_shares_sum_to_one():
  report, _, account = _report()
  with account.measure('compute'):
    time.sleep(0.02)
  values = report.take()
  metrics.check_names(values)
  shares = [v for name, v in values.items() if name.startswith('utilisation')]
  assert len(shares) == 4
  assert sum(shares) == pytest.approx(1.0)
  assert values['utilisation_compute'] > 0.2
