"""The frozen list of metric names."""

import pytest

from tunix_reverb.telemetry import metrics

# Renaming one breaks dashboards and saved runs: change this on purpose only.
_NAMES = """
policy_version
learner_step learner_steps_per_s transitions_per_s transitions_total
utilisation_compute utilisation_waiting utilisation_publishing
utilisation_other batch_fill recompiles_total compile_s checkpoint_s publish_s
policy_lag_mean policy_lag_p50 policy_lag_p95 policy_lag_max
age_s_mean age_s_p95 age_s_max
dropped_lag_total dropped_age_total dropped_poison_total
dropped_shutdown_total
dropped_decile_0_total dropped_decile_1_total dropped_decile_2_total
dropped_decile_3_total dropped_decile_4_total dropped_decile_5_total
dropped_decile_6_total dropped_decile_7_total dropped_decile_8_total
dropped_decile_9_total
admission_hold_s_total permits_untaken permits_taken permits_reissued_total
loss pg_loss baseline_loss entropy grad_norm param_norm rho_mean
rho_clipped_fraction c_mean c_clipped_fraction ess behaviour_kl
behaviour_kl_k2 behaviour_kl_k3 ppo_clipped_high_fraction
ppo_clipped_low_fraction ppo_clipped_dual_fraction value_mean
mismatch_log_prob mismatch_kl_k3 mismatch_transitions
learning_rate non_finite_updates non_finite_updates_total
actor_steps_per_s actor_steps_total episode_return_mean episode_length_mean
episodes_total blocked_s_total blocked_by_network_s_total variables_age_s
environment_failures_total items_total parked_environments
tokens_total active_episodes segments_cut_total conversations_abandoned_total
tool_calls_total tool_call_s_p50 tool_call_s_p99 truncated_episodes_total
parser_errors_total tool_errors_total sandbox_errors_total timeout_errors_total
environment_errors_total
utilisation_act utilisation_permit utilisation_environment utilisation_adder
table_items inserts_total samples_total inserts_blocked samples_blocked
inserts_blocked_s_total samples_blocked_s_total replay_checkpoint_s
swept_lag_total swept_age_total sweep_entries sweep_s
evaluation_return_mean evaluation_return_std evaluation_return_min
evaluation_return_max evaluation_episodes evaluation_length_mean
evaluation_success_rate evaluation_success_low evaluation_success_high
""".split()


def test_the_list_is_frozen():
  assert list(metrics.METRICS) == _NAMES
  with pytest.raises(TypeError):
    metrics.METRICS['loss'] = metrics.Metric('1', 'x', ())


@pytest.mark.parametrize('name', _NAMES)
def test_every_metric_is_documented(name):
  metric = metrics.METRICS[name]
  assert metric.unit and metric.roles
  assert len(metric.help) > 8 and metric.help.endswith('.')
  if name.endswith(('_s', '_s_total')) and not name.endswith('_per_s'):
    assert metric.unit == 's'


def test_an_unknown_name_is_refused_by_name():
  metrics.check_names(['loss', 'entropy'])
  with pytest.raises(ValueError, match='fps'):
    metrics.check_names(['loss', 'fps'])
