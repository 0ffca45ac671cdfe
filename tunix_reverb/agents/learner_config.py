"""The learner's part of the config: batches, mesh and update."""

from __future__ import annotations

import dataclasses
import itertools

from tunix_reverb.agents import fields


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
class MeshConfig:
  """The devices of the learner."""

  data_axis: int = fields.field(
    0,
    'Devices along the data axis of the mesh, which split the rows of a batch; '
    '0 takes all there are.',
  )
  fsdp_axis: int = fields.field(
    1,
    'Devices along the fsdp axis, which split rows and, of a transformer, '
    'params and optimiser state.',
  )
  sequence_axis: int = fields.field(
    1, 'Devices along the sequence axis, which split long rows (transformer).'
  )
  tensor_axis: int = fields.field(
    1,
    'Devices along the tensor axis, which split heads, MLP and vocabulary '
    '(transformer).',
  )
  virtual_devices: int = fields.field(
    0,
    'Devices that each learner process splits its CPU into, to try a mesh '
    'without accelerators; 0 takes the devices there are.',
  )
  num_learners: int = fields.field(
    1,
    'Learner processes, whose devices make up one mesh; each packs the rows '
    'of a batch that lie on its own.',
  )

  def __post_init__(self) -> None:
    fields.positive(
      self, 'fsdp_axis', 'sequence_axis', 'tensor_axis', 'num_learners'
    )
    fields.non_negative(self, 'data_axis', 'virtual_devices')


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
  behaviour_kl_cost: float = fields.field(
    0.0,
    'Factor of half the squared logarithm of the importance ratio, which pulls '
    'the policy back to the one that acted. Around 0.006 where data are many '
    'updates old.',
  )
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
  num_micro_batches: int = fields.field(
    1,
    'Parts that the rows of each device are learnt in, one after the other, '
    'for one update: takes less memory.',
  )
  updates_per_batch: int = fields.field(
    1,
    'Optimiser updates that a batch is split up for, by rows. Together they '
    'are one learner step.',
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
      'num_micro_batches',
      'updates_per_batch',
    )
    fields.non_negative(
      self,
      'baseline_cost',
      'entropy_cost',
      'behaviour_kl_cost',
      'reward_clip',
      'learner_checkpoint_period_s',
    )
    for name in ('discount_factor', 'vtrace_lambda', 'learning_rate_end'):
      value = getattr(self, name)
      fields.require(0.0 <= value <= 1.0, name, value, 'be between 0 and 1')
