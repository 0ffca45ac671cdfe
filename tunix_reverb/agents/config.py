"""The experiment's configuration: one frozen, validated record for every role.

Only the standard library is imported here, so that a binary's `--help` and a
bad flag answer at once. Every field becomes a flag of the same name (see
`launch/flags.py`); field names are therefore unique over all groups, and each
carries its help text with its unit.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

from tunix_reverb.agents import fields
from tunix_reverb.agents import learner_config
from tunix_reverb.agents.transformer import config as transformer_config
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
    'With admission, trajectories of one update. 0: as many as always fit a '
    'batch, about batch_positions / (trajectory_length + 1).',
  )
  trajectories_in_flight: int = fields.field(
    0,
    'With admission, most trajectories from their permit to their update. 0: '
    '(max_policy_lag + 1) * trajectories_per_update, the most there may be. '
    'Where actors are faster than the learner, fewer make what it learns from '
    'younger; with too few it waits.',
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
      'trajectories_in_flight',
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


AGENTS = ('vtrace', 'transformer')

GROUPS: Mapping[str, type] = {
  'network': vtrace_config.NetworkConfig,
  'transformer': transformer_config.TransformerConfig,
  'actor': ActorConfig,
  'replay': ReplayConfig,
  'staleness': StalenessConfig,
  'batch': learner_config.BatchConfig,
  'mesh': learner_config.MeshConfig,
  'learner': learner_config.LearnerConfig,
  'evaluation': EvaluationConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
  """Everything that every role must agree on."""

  agent: str = fields.field(
    'vtrace',
    'vtrace: the V-trace actor-critic, a policy network (config group '
    'network); transformer: V-trace over tokens, a transformer sharded over '
    'the mesh (group transformer), for environments of tokens.',
    AGENTS,
  )
  environment: str = fields.field(
    'catch',
    'catch, bsuite:<id>, gym:<id>, atari:<game>, '
    'dm_control:<domain>/<task>, envpool:<id>, tool:<task>, '
    'reasoning_gym:<dataset>, outside (agents that speak to launch.endpoint), '
    'or module:factory.',
  )
  seed: int = fields.field(0, 'Seed of everything random, int.')
  watchdog_s: float = fields.field(
    120.0, 'Seconds without progress after which a role ends with an error.'
  )
  network: vtrace_config.NetworkConfig = dataclasses.field(
    default_factory=vtrace_config.NetworkConfig
  )
  transformer: transformer_config.TransformerConfig = dataclasses.field(
    default_factory=transformer_config.TransformerConfig
  )
  actor: ActorConfig = dataclasses.field(default_factory=ActorConfig)
  replay: ReplayConfig = dataclasses.field(default_factory=ReplayConfig)
  staleness: StalenessConfig = dataclasses.field(
    default_factory=StalenessConfig
  )
  batch: learner_config.BatchConfig = dataclasses.field(
    default_factory=learner_config.BatchConfig
  )
  mesh: learner_config.MeshConfig = dataclasses.field(
    default_factory=learner_config.MeshConfig
  )
  learner: learner_config.LearnerConfig = dataclasses.field(
    default_factory=learner_config.LearnerConfig
  )
  evaluation: EvaluationConfig = dataclasses.field(
    default_factory=EvaluationConfig
  )

  def __post_init__(self) -> None:
    fields.require(
      self.agent in AGENTS,
      'agent',
      self.agent,
      f'be one of {", ".join(AGENTS)}',
    )
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
    self._validate_mesh()
    if self.replay.admission:
      self._validate_admission()

  def _validate_admission(self) -> None:
    size = self.transformer.group_size
    for name in ('trajectories_per_update', 'trajectories_in_flight'):
      fields.require(
        getattr(self, name) % size == 0,
        name,
        getattr(self, name),
        f'be a multiple of group_size ({size}), as groups are learnt whole',
      )
    wanted, most = self.replay.trajectories_per_update, self._fitting
    fields.require(
      self.staleness.max_policy_lag > 0 or wanted <= most,
      'trajectories_per_update',
      wanted,
      f'be <= {most} with max_policy_lag=0, so that one batch takes all of an '
      'update: lower it or raise batch_positions',
    )
    least = self.trajectories_per_update
    most = (self.staleness.max_policy_lag + 1) * least
    fields.require(
      least <= self.trajectories_in_flight <= most,
      'trajectories_in_flight',
      self.trajectories_in_flight,
      f'be 0, or from trajectories_per_update ({least}) to max_policy_lag + 1 '
      f'times as many ({most})',
    )

  def _validate_mesh(self) -> None:
    split = self.mesh.sequence_axis * self.mesh.tensor_axis
    fields.require(
      self.mesh.num_learners == 1 or not self.replay.admission,
      'num_learners',
      self.mesh.num_learners,
      'be 1 with admission: one process gives the permits. Set --noadmission '
      'or --num_learners=1',
    )
    fields.require(
      self.agent == 'transformer' or split == 1,
      'sequence_axis and tensor_axis',
      (self.mesh.sequence_axis, self.mesh.tensor_axis),
      f'be 1 with agent {self.agent}, or devices would repeat the same work: '
      'set --agent=transformer',
    )
    fields.require(
      not any(length % split for length in self.batch.bucket_lengths),
      'bucket_lengths',
      self.batch.bucket_lengths,
      f'be multiples of sequence_axis * tensor_axis ({split}), which split '
      'the rows',
    )

  @property
  def trajectories_per_update(self) -> int:
    """With admission, the trajectories of one update."""
    return self.replay.trajectories_per_update or self._fitting

  @property
  def trajectories_in_flight(self) -> int:
    """With admission, the trajectories that permits are given for."""
    return self.replay.trajectories_in_flight or (
      (self.staleness.max_policy_lag + 1) * self.trajectories_per_update
    )

  @property
  def _fitting(self) -> int:
    """Trajectories that fit a batch of the longest rows, however long."""
    row = self.batch.bucket_lengths[-1]
    per_row = row // (self.actor.trajectory_length + 1)
    return (self.batch.batch_positions // row) * per_row
