"""Every metric there is: the frozen, documented list.

Names carry their unit; `_total` counts from the start of the process. A name
that is not here is refused, so that this page stays true.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import types

LEARNER = 'learner'
ACTOR = 'actor'
REPLAY_SERVER = 'replay_server'
EVALUATOR = 'evaluator'

# Why trajectories are dropped instead of learnt.
DROP_CAUSES = ('lag', 'age', 'poison', 'shutdown')
# How many were dropped by length, the shortest tenth first.
DECILE_NAMES = tuple(f'dropped_decile_{i}_total' for i in range(10))


@dataclasses.dataclass(frozen=True)
class Metric:
  """One metric.

  Attributes:
    unit: its unit; '1' for a plain number.
    help: what it says.
    roles: the kinds of role that write it.
  """

  unit: str
  help: str
  roles: tuple[str, ...]


def _of(*roles: str, **metrics: tuple[str, str]) -> dict[str, Metric]:
  return {
    name: Metric(unit, text, roles) for name, (unit, text) in metrics.items()
  }


def _learner() -> dict[str, Metric]:
  return {
    **_of(
      LEARNER,
      learner_step=('updates', 'Optimiser updates since training began.'),
      learner_steps_per_s=('updates/s', 'Optimiser updates per second.'),
      transitions_per_s=('transitions/s', 'Transitions learnt per second.'),
      transitions_total=(
        'transitions',
        'Transitions learnt since training began.',
      ),
      utilisation_compute=(
        'fraction',
        'Share of wall time in the update itself.',
      ),
      utilisation_waiting=(
        'fraction',
        'Share of wall time waiting for a batch.',
      ),
      utilisation_publishing=(
        'fraction',
        'Share of wall time publishing variables.',
      ),
      utilisation_other=('fraction', 'Share of wall time in all else.'),
      batch_fill=(
        'fraction',
        'Positions of a batch that hold data, not padding.',
      ),
      recompiles_total=(
        'compiles',
        'XLA compilations after warm-up; must stay 0.',
      ),
      compile_s=('s', 'Seconds spent compiling since the process began.'),
      checkpoint_s=(
        's',
        'Seconds the last learner checkpoint held up the learner.',
      ),
      publish_s=('s', 'Seconds the last publish of variables took.'),
    ),
    **_staleness(),
    **_admission(),
    **_optimisation(),
  }


def _staleness() -> dict[str, Metric]:
  trajectories = 'Trajectories dropped because'
  drops = {
    'lag': f'{trajectories} their policy_lag exceeded max_policy_lag.',
    'age': f'{trajectories} they were older than max_age_s.',
    'poison': 'Items dropped because their columns were unreadable: nobody '
    'knows how many trajectories they held, nor of which length.',
    'shutdown': f'{trajectories} the learner ended before using them.',
  }
  deciles = {
    name: (
      'trajectories',
      f'Trajectories dropped whose length is in decile {i} (0 shortest) '
      'of all trajectories seen.',
    )
    for i, name in enumerate(DECILE_NAMES)
  }
  lag = 'policy_lag of the trajectories handed to the update'
  age = 'Age of the trajectories handed to the update'
  return _of(
    LEARNER,
    policy_lag_mean=('publishes', f'Mean {lag}.'),
    policy_lag_p50=('publishes', f'Median {lag}.'),
    policy_lag_p95=('publishes', f'95th percentile of the {lag}.'),
    policy_lag_max=('publishes', f'Largest {lag}.'),
    age_s_mean=('s', f'{age}, mean.'),
    age_s_p95=('s', f'{age}, 95th percentile.'),
    age_s_max=('s', f'{age}, largest.'),
    **{
      f'dropped_{cause}_total': (
        'items' if cause == 'poison' else 'trajectories',
        text,
      )
      for cause, text in drops.items()
    },
    **deciles,
  )


def _admission() -> dict[str, Metric]:
  return _of(
    LEARNER,
    admission_hold_s_total=(
      's',
      'Seconds the learner had no batch because an update would have made '
      'trajectories too old that were still under way. With admission only, as '
      'the next three.',
    ),
    permits_untaken=('permits', 'Permits that wait for an actor.'),
    permits_taken=(
      'permits',
      'Permits with actors, whose trajectories have not arrived.',
    ),
    permits_reissued_total=(
      'permits',
      'Permits whose lease ended before a trajectory came; given to others.',
    ),
  )


def _optimisation() -> dict[str, Metric]:
  return _of(
    LEARNER,
    loss=('1', 'Total loss.'),
    pg_loss=('1', 'Policy-gradient loss.'),
    baseline_loss=('1', 'Baseline (value) loss, before its factor.'),
    entropy=('nats', 'Mean entropy of the policy.'),
    grad_norm=('1', 'Global norm of the gradients before clipping.'),
    param_norm=('1', 'Global norm of the params.'),
    rho_mean=('1', 'Mean importance ratio before clipping.'),
    rho_clipped_fraction=(
      'fraction',
      'Transitions whose importance ratio is above the cap of the loss.',
    ),
    c_mean=('1', 'Mean trace coefficient, after its clip.'),
    c_clipped_fraction=(
      'fraction',
      'Transitions whose trace coefficient was clipped.',
    ),
    ess=(
      'fraction',
      'Effective sample size of the importance ratios over their number.',
    ),
    behaviour_kl=(
      'nats',
      'Estimate of the KL divergence of the behaviour from the target policy: '
      'the mean of minus the log ratios.',
    ),
    behaviour_kl_k2=(
      'nats',
      'The same as half the mean square of the log ratios of single actions: '
      'what behaviour_kl_cost weighs.',
    ),
    behaviour_kl_k3=(
      'nats',
      'The same with less variance: the mean of ratio - 1 - log ratio, never '
      'below 0.',
    ),
    ppo_clipped_high_fraction=(
      'fraction',
      "Tokens that PPO's clip kept from becoming more likely still.",
    ),
    ppo_clipped_low_fraction=(
      'fraction',
      "Tokens that PPO's clip kept from becoming less likely still.",
    ),
    ppo_clipped_dual_fraction=(
      'fraction',
      "Tokens that PPO's dual clip kept from becoming less likely.",
    ),
    value_mean=('1', 'Mean value estimate.'),
    mismatch_log_prob=(
      'nats',
      'Mean distance of the log-probability that the learner computes of a '
      'token from what the actor recorded, of tokens that the same params have '
      'sampled: rounding. Above 0.01 something else differs. Absent without '
      'such tokens.',
    ),
    mismatch_kl_k3=(
      'nats',
      'The same as an estimate of the KL divergence, as behaviour_kl_k3; above '
      '0.001 look into it.',
    ),
    mismatch_transitions=(
      'transitions',
      'Tokens of the last update that these two are of.',
    ),
    learning_rate=('1', 'Learning rate of the last update.'),
    non_finite_updates=(
      'updates',
      'Updates in a row, up to the last one, that were skipped because loss '
      'or gradients were not finite.',
    ),
    non_finite_updates_total=(
      'updates',
      'Updates skipped for that reason since training began.',
    ),
  )


def _actor() -> dict[str, Metric]:
  return _of(
    ACTOR,
    actor_steps_per_s=('steps/s', 'Environment steps per second.'),
    actor_steps_total=('steps', 'Environment steps since the start.'),
    episode_return_mean=(
      '1',
      'Mean return of the training episodes that just ended.',
    ),
    episode_length_mean=(
      'steps',
      'Mean length of the training episodes that just ended.',
    ),
    episodes_total=('episodes', 'Training episodes ended since the start.'),
    blocked_s_total=(
      's',
      'Seconds spent waiting for room in the table since the start.',
    ),
    blocked_by_network_s_total=(
      's',
      'Those of them that the rate limiter is not to blame for: the server was '
      'silent, or items were on their way. The official client cannot tell: 0.',
    ),
    variables_age_s=(
      's',
      'Seconds since the learner published the newest variables that have '
      'come.',
    ),
    environment_failures_total=(
      'failures',
      'Environments replaced after an exception or a timeout.',
    ),
    items_total=('items', 'Items written since the start.'),
    parked_environments=(
      'environments',
      'Environments that wait for a permit, with admission; else 0.',
    ),
    tokens_total=(
      'tokens',
      'Tokens that the policy has sampled since the start, in turns.',
    ),
    active_episodes=(
      'episodes',
      'Episodes whose turn is being written; the others wait for their '
      'environments or for a permit.',
    ),
    segments_cut_total=(
      'trajectories',
      'Trajectories cut off because an agent outside had changed what was said '
      'before, of endpoints.',
    ),
    conversations_abandoned_total=(
      'trajectories',
      'Trajectories dropped because an agent outside did not go on or post a '
      'reward, of endpoints.',
    ),
    **_tools(),
    utilisation_act=('fraction', 'Share of wall time in the policy.'),
    utilisation_permit=(
      'fraction',
      'Share of wall time waiting for permits, of actors that play turns.',
    ),
    utilisation_environment=(
      'fraction',
      'Share of wall time stepping environments.',
    ),
    utilisation_adder=(
      'fraction',
      'Share of wall time building and writing items.',
    ),
  )


def _tools() -> dict[str, tuple[str, str]]:
  """Of actors that play turn environments."""
  errors = {
    'parser': 'Calls of tools that could not be read or made as the policy '
    'wrote them. Since the start, of episodes that have ended, as the others.',
    'tool': 'Calls that a tool refused.',
    'sandbox': 'Calls whose program the sandbox stopped at a limit.',
    'timeout': 'Calls that were not answered in time.',
    'environment': 'Episodes that were cut because the task itself raised.',
  }
  return {
    'tool_calls_total': ('calls', 'Calls of tools.'),
    'tool_call_s_p50': (
      's',
      'Median seconds of the latest 1000 calls, attempts and waiting included.',
    ),
    'tool_call_s_p99': ('s', '99th percentile of the same.'),
    'truncated_episodes_total': (
      'episodes',
      'Episodes that a limit of turns or tokens has cut.',
    ),
    **{
      f'{kind}_errors_total': (
        'episodes' if kind == 'environment' else 'calls',
        text,
      )
      for kind, text in errors.items()
    },
  }


def _replay_server() -> dict[str, Metric]:
  return _of(
    REPLAY_SERVER,
    table_items=('items', 'Items in the trajectory table.'),
    inserts_total=('items', 'Items inserted since the table was made.'),
    samples_total=('items', 'Items sampled since the table was made.'),
    inserts_blocked=(
      '0 or 1',
      'Whether the rate limiter of this server holds back inserts.',
    ),
    samples_blocked=(
      '0 or 1',
      'Whether the rate limiter of this server holds back samples.',
    ),
    inserts_blocked_s_total=(
      's',
      'Seconds that inserts were held back since the server started.',
    ),
    samples_blocked_s_total=(
      's',
      'Seconds that samples were held back since the server started.',
    ),
    replay_checkpoint_s=('s', 'Seconds the last replay checkpoint took.'),
    swept_lag_total=(
      'items',
      'Items removed from the table since the process began because their '
      'policy_lag exceeded max_policy_lag. With admission only, as the other '
      'metrics of the sweeper.',
    ),
    swept_age_total=(
      'items',
      'Items removed from the table because they were older than max_age_s.',
    ),
    sweep_entries=(
      'items',
      'Items the sweeper knows of, consumed ones included until they are too '
      'old.',
    ),
    sweep_s=('s', 'Seconds the last sweep took.'),
  )


def _evaluator() -> dict[str, Metric]:
  return _of(
    EVALUATOR,
    evaluation_return_mean=('1', 'Mean return of one evaluation.'),
    evaluation_return_std=('1', 'Standard deviation of its returns.'),
    evaluation_return_min=('1', 'Smallest return of one evaluation.'),
    evaluation_return_max=('1', 'Largest return of one evaluation.'),
    evaluation_episodes=('episodes', 'Episodes of one evaluation.'),
    evaluation_length_mean=('steps', 'Mean length of its episodes.'),
    evaluation_success_rate=(
      'fraction',
      'Episodes that reached what their task asks for, of tasks that say so.',
    ),
    evaluation_success_low=(
      'fraction',
      'Lower end of the 95% confidence interval of that rate (Wilson).',
    ),
    evaluation_success_high=('fraction', 'Upper end of it.'),
  )


METRICS: Mapping[str, Metric] = types.MappingProxyType(
  {
    **_of(
      LEARNER,
      ACTOR,
      EVALUATOR,
      policy_version=('publishes', 'Version of the variables the role has.'),
    ),
    **_learner(),
    **_actor(),
    **_replay_server(),
    **_evaluator(),
  }
)


def check_names(names: Iterable[str]) -> None:
  """Refuses names that are not in `METRICS`.

  Raises:
    ValueError: names the unknown metrics.
  """
  unknown = sorted(set(names) - METRICS.keys())
  if unknown:
    raise ValueError(
      f'metric names {unknown} must be listed in telemetry/metrics.py'
    )
