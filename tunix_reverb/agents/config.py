"""The experiment's configuration: one frozen, validated record for every role.

Only the standard library is imported here, so that a binary's `--help` and a
bad flag answer at once. Every field becomes a flag of the same name (see
`launch/flags.py`); field names are therefore unique over all groups, and each
carries its help text with its unit.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import itertools
import math

from tunix_reverb.agents import fields
from tunix_reverb.agents.vtrace import config as vtrace_config
from tunix_reverb.replay import client_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
  """The actor pool."""

  num_actors: int = fields.field(2, 'Actor processes.')
  environments_per_actor: int = fields.field(
    32, 'Environments behind one policy call in each actor process.'
  )
  environment_mode: str = fields.field(
    'vectorised',
    'vectorised: all environments step together (fast environments); '
    'asynchronous: each steps in its own thread and none waits for another '
    '(slow ones).',
    ('vectorised', 'asynchronous'),
  )
  environment_timeout_s: float = fields.field(
    60.0,
    'Seconds an asynchronous environment may take for one step before it is '
    'replaced and its trajectory cut.',
  )
  trajectory_length: int = fields.field(
    99,
    'Most transitions T of one stored trajectory. Shorter episodes are '
    'stored whole; longer ones as unrolls of T that overlap by one bootstrap '
    'timestep.',
  )
  item_bytes: int = fields.field(
    262144,
    'Trajectories of one actor are grouped into an item up to this size, '
    'bytes, or up to half a batch. 1 stores each trajectory as an item of its '
    'own.',
  )
  item_age_s: float = fields.field(
    0.1, 'A group of trajectories is sent at this age, seconds.'
  )
  variable_update_period_s: float = fields.field(
    0.1, 'How often actors ask for newer variables, seconds.'
  )

  def __post_init__(self) -> None:
    fields.validate_choices(self)
    fields.positive(
      self,
      'num_actors',
      'environments_per_actor',
      'environment_timeout_s',
      'trajectory_length',
      'item_bytes',
      'item_age_s',
      'variable_update_period_s',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig:
  """The replay server's tables."""

  replay_client: str = fields.field(
    client_names.DEFAULT,
    'How actors, learner and evaluator speak to the replay server. wire: its '
    'gRPC protocol, without dm-reverb and TensorFlow in the process; official: '
    "dm-reverb's own client.",
    client_names.CLIENTS,
  )
  replay_mode: str = fields.field(
    'queue',
    'queue: each item is learnt once, oldest first; replay: items are '
    'sampled samples_per_insert times on average.',
    ('queue', 'replay'),
  )
  sampler: str = fields.field(
    'uniform',
    'Item selection in replay mode; prioritised prefers fresh policies '
    '(priority is the minimum policy_version).',
    ('uniform', 'prioritised'),
  )
  priority_exponent: float = fields.field(
    1.0, 'Exponent of the prioritised sampler, no unit.'
  )
  max_table_items: int = fields.field(
    8, 'Most items in the table of one server. In queue mode inserts wait.'
  )
  min_table_items: int = fields.field(
    1, 'Items in the table before replay mode hands out samples.'
  )
  samples_per_insert: float = fields.field(
    2.0, 'Times an item is sampled on average in replay mode.'
  )
  samples_per_insert_tolerance: float = fields.field(
    0.5,
    'Slack of samples_per_insert before one side waits, as a fraction of '
    'max_table_items * samples_per_insert.',
  )
  num_servers: int = fields.field(
    1, 'Replay servers the items are spread over (shards).'
  )
  admission: bool = fields.field(
    False,
    'No trajectory is begun without a permit of the learner, which then loses '
    'none for its lag: for slow environments. Each trajectory is an item of '
    'its own, and max_table_items has no meaning.',
  )
  trajectories_per_update: int = fields.field(
    0,
    'With admission, trajectories of one update; (max_policy_lag + 1) times as '
    'many are under way. 0: as many as always fit a batch, about '
    'batch_positions / (trajectory_length + 1).',
  )
  permit_lease_s: float = fields.field(
    600.0,
    'With admission, seconds a trajectory may take from its permit to the '
    'learner, which may wait for it that long; then the permit is given to '
    'another one.',
  )
  replay_checkpoint_period_s: float = fields.field(
    300.0, 'Seconds between replay checkpoints; 0 writes one at exit only.'
  )
  replay_checkpoints_to_keep: int = fields.field(
    2, 'Newest replay checkpoints kept on disk, per server.'
  )

  def __post_init__(self) -> None:
    fields.validate_choices(self)
    fields.positive(
      self,
      'max_table_items',
      'min_table_items',
      'samples_per_insert',
      'samples_per_insert_tolerance',
      'num_servers',
      'replay_checkpoints_to_keep',
      'permit_lease_s',
    )
    fields.non_negative(
      self,
      'replay_checkpoint_period_s',
      'priority_exponent',
      'trajectories_per_update',
    )
    if self.admission:
      for name, value in (('replay_mode', 'queue'), ('replay_client', 'wire')):
        fields.require(
          getattr(self, name) == value,
          name,
          getattr(self, name),
          f'be {value} with admission: set --{name}={value} or --noadmission',
        )
    fields.require(
      self.min_table_items <= self.max_table_items,
      'min_table_items',
      self.min_table_items,
      f'be <= max_table_items ({self.max_table_items}), or no sample is ever '
      'handed out',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessConfig:
  """What is too old to learn from."""

  max_policy_lag: int = fields.field(
    64,
    'Trajectories whose oldest transition is more publishes behind the '
    'learner than this are dropped.',
  )
  max_age_s: float = fields.field(
    300.0, 'Trajectories older than this are dropped, seconds.'
  )
  sweep_period_s: float = fields.field(
    1.0,
    'With admission, seconds from one removal of what is too old in the table '
    'to the next.',
  )

  def __post_init__(self) -> None:
    fields.non_negative(self, 'max_policy_lag')
    fields.positive(self, 'max_age_s', 'sweep_period_s')


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
  """Length buckets and packing."""

  bucket_lengths: tuple[int, ...] = fields.field(
    (100,),
    'Row lengths L, ascending, positions. A trajectory takes T + 1; the '
    'largest must hold trajectory_length + 1.',
  )
  batch_positions: int = fields.field(
    4000,
    'Positions of one global batch: each bucket has about '
    'batch_positions / L rows.',
  )
  packing_window: float = fields.field(
    1.25,
    'Trajectories gathered before a batch is packed, in batches. More fills '
    'rows better and ages data longer.',
  )
  prefetch_batches: int = fields.field(
    1, 'Packed batches placed on the devices ahead of the update.'
  )

  def __post_init__(self) -> None:
    fields.positive(self, 'batch_positions', 'prefetch_batches')
    fields.require(
      self.packing_window >= 1.0,
      'packing_window',
      self.packing_window,
      'be >= 1',
    )
    lengths = self.bucket_lengths
    fields.require(
      len(lengths) > 0
      and lengths[0] >= 2
      and all(a < b for a, b in itertools.pairwise(lengths)),
      'bucket_lengths',
      lengths,
      'be ascending row lengths, all >= 2',
    )
    fields.require(
      self.batch_positions >= lengths[-1],
      'batch_positions',
      self.batch_positions,
      f'hold at least one row of the largest bucket ({lengths[-1]})',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
  """The update and its optimiser."""

  learning_rate: float = fields.field(2e-3, 'Initial learning rate.')
  learning_rate_end: float = fields.field(
    0.02,
    'Final learning rate as a fraction of the initial one, reached linearly '
    'after learning_rate_decay_steps.',
  )
  learning_rate_decay_steps: int = fields.field(
    4000, 'Learner steps over which the learning rate falls.'
  )
  max_grad_norm: float = fields.field(1.0, 'Global-norm gradient clip.')
  discount_factor: float = fields.field(
    0.99, "The agent's constant, multiplied with the environment's discount."
  )
  rho_bar: float = fields.field(
    1.0, 'V-trace clip of the importance ratio rho.'
  )
  c_bar: float = fields.field(1.0, 'V-trace clip of the trace coefficient c.')
  vtrace_lambda: float = fields.field(0.95, 'V-trace mixing of n-step targets.')
  baseline_cost: float = fields.field(0.5, 'Factor of the baseline loss.')
  entropy_cost: float = fields.field(0.01, 'Factor of the entropy bonus.')
  reward_clip: float = fields.field(
    0.0, 'Rewards are clipped to +-this in the loss; 0 leaves them alone.'
  )
  reward_scale: float = fields.field(
    1.0,
    'Rewards are multiplied by this in the loss, after the clip; choose it so '
    'that returns are of the order of 1 to 10.',
  )
  publish_period: int = fields.field(
    1, 'Learner steps between publishes of the variables.'
  )
  max_learner_steps: int = fields.field(
    1_000_000, 'Learner steps after which training ends.'
  )
  max_non_finite_updates: int = fields.field(
    10, 'Skipped non-finite updates in a row that end the run.'
  )
  data_axis: int = fields.field(
    0, 'Devices along the data axis of the mesh; 0 takes all there are.'
  )
  learner_checkpoint_period_s: float = fields.field(
    60.0, 'Seconds between learner checkpoints; 0 writes one at exit only.'
  )
  learner_checkpoints_to_keep: int = fields.field(
    3, 'Newest learner checkpoints kept on disk.'
  )

  def __post_init__(self) -> None:
    fields.positive(
      self,
      'learning_rate',
      'learning_rate_decay_steps',
      'max_grad_norm',
      'rho_bar',
      'c_bar',
      'publish_period',
      'max_learner_steps',
      'max_non_finite_updates',
      'learner_checkpoints_to_keep',
      'reward_scale',
    )
    fields.non_negative(
      self,
      'baseline_cost',
      'entropy_cost',
      'reward_clip',
      'data_axis',
      'learner_checkpoint_period_s',
    )
    for name in ('discount_factor', 'vtrace_lambda', 'learning_rate_end'):
      value = getattr(self, name)
      fields.require(0.0 <= value <= 1.0, name, value, 'be between 0 and 1')


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
  """Evaluation beside training, and when the run counts as solved."""

  evaluation_episodes: int = fields.field(
    100, 'Episodes of one evaluation, played with the most likely actions.'
  )
  evaluation_period_s: float = fields.field(
    3.0, 'Seconds between evaluations; 0 runs no evaluator.'
  )
  solved_return: float = fields.field(
    math.inf,
    'Mean evaluation return at which training is solved and ends; the '
    'default Catch run is solved at 0.95.',
  )
  hold_s: float = fields.field(
    0.0,
    'Seconds the run goes on after solved_return was first reached; it is '
    'solved if the evaluation at the end still reaches it.',
  )
  max_run_s: float = fields.field(
    0.0, 'Seconds after which the whole run stops; 0 sets no limit.'
  )

  def __post_init__(self) -> None:
    fields.positive(self, 'evaluation_episodes')
    fields.non_negative(self, 'evaluation_period_s', 'hold_s', 'max_run_s')


GROUPS: Mapping[str, type] = {
  'network': vtrace_config.NetworkConfig,
  'actor': ActorConfig,
  'replay': ReplayConfig,
  'staleness': StalenessConfig,
  'batch': BatchConfig,
  'learner': LearnerConfig,
  'evaluation': EvaluationConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
  """Everything that every role must agree on."""

  environment: str = fields.field(
    'catch',
    'catch, bsuite:<id>, gym:<id>, atari:<game>, '
    'dm_control:<domain>/<task>, envpool:<id>, or module:factory.',
  )
  seed: int = fields.field(0, 'Seed of everything random, int.')
  watchdog_s: float = fields.field(
    120.0, 'Seconds without progress after which a role ends with an error.'
  )
  network: vtrace_config.NetworkConfig = dataclasses.field(
    default_factory=vtrace_config.NetworkConfig
  )
  actor: ActorConfig = dataclasses.field(default_factory=ActorConfig)
  replay: ReplayConfig = dataclasses.field(default_factory=ReplayConfig)
  staleness: StalenessConfig = dataclasses.field(
    default_factory=StalenessConfig
  )
  batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
  learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
  evaluation: EvaluationConfig = dataclasses.field(
    default_factory=EvaluationConfig
  )

  def __post_init__(self) -> None:
    fields.require(
      bool(self.environment),
      'environment',
      self.environment,
      'name an environment',
    )
    fields.require(self.seed >= 0, 'seed', self.seed, 'be >= 0')
    fields.positive(self, 'watchdog_s')
    positions = self.actor.trajectory_length + 1
    fields.require(
      self.batch.bucket_lengths[-1] >= positions,
      'bucket_lengths',
      self.batch.bucket_lengths,
      f'end with a row of at least trajectory_length + 1 ({positions}) '
      'positions, or the longest trajectory fits no row',
    )
    wanted, most = self.replay.trajectories_per_update, self._fitting
    fields.require(
      not self.replay.admission
      or self.staleness.max_policy_lag > 0
      or wanted <= most,
      'trajectories_per_update',
      wanted,
      f'be <= {most} with max_policy_lag=0, so that one batch takes all of an '
      'update: lower it or raise batch_positions',
    )

  @property
  def trajectories_per_update(self) -> int:
    """With admission, the trajectories of one update."""
    return self.replay.trajectories_per_update or self._fitting

  @property
  def _fitting(self) -> int:
    """Trajectories that fit a batch of the longest rows, however long."""
    row = self.batch.bucket_lengths[-1]
    per_row = row // (self.actor.trajectory_length + 1)
    return (self.batch.batch_positions // row) * per_row
