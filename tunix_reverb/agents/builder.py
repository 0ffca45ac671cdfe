"""Wires the parts of an agent together: the one composition root.

Every role builds its parts here, from the same config, so that they agree.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.agents import agent as agent_lib
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents import learner_config
from tunix_reverb.batching import buckets as buckets_lib
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.learner import admission as admission_lib
from tunix_reverb.learner import checkpoints
from tunix_reverb.learner import feed as feed_lib
from tunix_reverb.learner import group as group_lib
from tunix_reverb.learner import group_feed
from tunix_reverb.learner import learner as learner_lib
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import publisher as publisher_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import processes
from tunix_reverb.staleness import bound as bound_lib
from tunix_reverb.telemetry import drops as drops_lib
from tunix_reverb.telemetry import metrics as metrics_lib
from tunix_reverb.telemetry import watchdog as watchdog_lib


def make_agent(config: config_lib.ExperimentConfig) -> agent_lib.Agent:
  """The agent that `config` names, for its environment.

  Raises:
    errors.UserError: the environment is not one for it.
  """
  # Here, because not everybody has the libraries of every agent.
  if config.agent == 'transformer':
    from tunix_reverb.agents.transformer import agent as transformer_agent

    return transformer_agent.make_agent(config)
  from tunix_reverb.agents.vtrace import agent as vtrace_agent

  return vtrace_agent.make_agent(config)


def make_table_config(
  config: config_lib.ExperimentConfig,
) -> tables.TableConfig:
  """What the replay server serves."""
  replay = config.replay
  return tables.TableConfig(
    mode=replay.replay_mode,
    balance=tables.PERMIT_BALANCE if replay.admission else tables.LIMITER,
    sampler=replay.sampler,
    priority_exponent=replay.priority_exponent,
    max_items=replay.max_table_items,
    min_items=replay.min_table_items,
    samples_per_insert=replay.samples_per_insert,
    samples_per_insert_tolerance=replay.samples_per_insert_tolerance,
  )


def make_buckets(
  config: config_lib.ExperimentConfig, *, row_multiple: int = 1
) -> tuple[buckets_lib.Bucket, ...]:
  """The batch shapes."""
  return buckets_lib.make_buckets(
    config.batch.bucket_lengths,
    batch_positions=config.batch.batch_positions,
    row_multiple=row_multiple,
  )


def make_bound(config: config_lib.ExperimentConfig) -> bound_lib.StalenessBound:
  """The staleness bound."""
  return bound_lib.StalenessBound(
    max_policy_lag=config.staleness.max_policy_lag,
    max_age_s=config.staleness.max_age_s,
  )


def make_sweeper(
  config: config_lib.ExperimentConfig,
  server: Any,
  columns: types.Trajectories,
) -> Any:
  """The sweeper of a replay server; None where its table needs none.

  Args:
    config: the run's config.
    server: of `clients.make_server`.
    columns: `Trajectories` of `ColumnSpec`, as the server has them.
  """
  if server.balance != tables.PERMIT_BALANCE:
    return None
  return clients.make_sweeper(
    server,
    columns=columns,
    bound=make_bound(config),
    period_s=config.staleness.sweep_period_s,
  )


@dataclasses.dataclass(frozen=True)
class LearnerParts:
  """The compiled update and what it works on.

  Attributes:
    mesh: the device mesh.
    buckets: batch shapes, of the rows that this process packs.
    batch_spec: how a batch lies on the mesh.
    state: fresh `update.LearnerState` on the mesh.
    updates: compiled update by row length.
  """

  mesh: jax.sharding.Mesh
  buckets: tuple[buckets_lib.Bucket, ...]
  batch_spec: mesh_lib.PartitionSpec
  state: update_lib.LearnerState
  updates: Mapping[int, learner_lib.CompiledUpdate]


def make_learner_parts(
  config: config_lib.ExperimentConfig,
  agent: agent_lib.Agent,
  *,
  devices: Sequence[jax.Device] | None = None,
) -> LearnerParts:
  """Makes the mesh and the state, and compiles the update of every bucket.

  Args:
    config: of the run.
    agent: its specs.
    devices: of all learner processes; None takes all there are.

  Raises:
    errors.UserError: the mesh does not fit the devices, or the model.
  """
  mesh = make_mesh(config.mesh, list(devices or jax.devices()))
  try:
    processes.check_rows(mesh)
    objective = agent.make_objective(config, mesh)
  except ValueError as e:
    raise errors.UserError(str(e)) from e
  optimiser = _optimiser(config.learner)
  key = jax.random.PRNGKey(config.seed)
  params = agent.initial_params(mesh, key=key)
  state = update_lib.init_state(
    objective, optimiser, mesh, key=key, params=params
  )
  parts = {
    'num_micro_batches': config.learner.num_micro_batches,
    'updates_per_batch': config.learner.updates_per_batch,
  }
  update = update_lib.make_update(objective, optimiser, mesh, **parts)
  buckets = tuple(
    bucket._replace(rows=bucket.rows // processes.num_processes(mesh))
    for bucket in make_buckets(
      config,
      row_multiple=mesh_lib.num_batch_shards(mesh) * math.prod(parts.values()),
    )
  )
  updates = {}
  for bucket in buckets:
    batch = packer_lib.empty_batch(bucket, agent.columns)
    batch = _place(batch, mesh, objective.batch_spec)
    updates[bucket.length] = update.lower(state, batch).compile()
  return LearnerParts(mesh, buckets, objective.batch_spec, state, updates)


def make_mesh(
  config: learner_config.MeshConfig, devices: Sequence[jax.Device]
) -> jax.sharding.Mesh:
  """Arranges as many of `devices` as the config's axes ask for.

  Raises:
    errors.UserError: there are too few.
  """
  rest = config.fsdp_axis * config.sequence_axis * config.tensor_axis
  data = config.data_axis or max(1, len(devices) // rest)
  if data * rest > len(devices):
    raise errors.UserError(
      f'data_axis * fsdp_axis * sequence_axis * tensor_axis ({data * rest}) '
      f'must be <= the devices there are ({len(devices)}); virtual_devices '
      'splits a CPU into more'
    )
  if config.num_learners > 1:
    devices = processes.by_process(devices)
    if data * rest != len(devices):
      raise errors.UserError(
        f'data_axis * fsdp_axis * sequence_axis * tensor_axis ({data * rest}) '
        f'must be the devices of all {config.num_learners} learner processes '
        f'({len(devices)})'
      )
  return mesh_lib.make_mesh(
    devices[: data * rest],
    data=data,
    fsdp=config.fsdp_axis,
    sequence=config.sequence_axis,
    tensor=config.tensor_axis,
  )


def _place(
  batch: types.Batch, mesh: jax.sharding.Mesh, spec: mesh_lib.PartitionSpec
) -> types.Batch:
  """Puts this process's rows on the mesh, which may be all there are."""
  if processes.num_processes(mesh) > 1:
    return processes.place_local_rows(batch, mesh, spec)
  return mesh_lib.place_batch(batch, mesh, spec)


def make_feed(
  config: config_lib.ExperimentConfig,
  agent: agent_lib.Agent,
  parts: LearnerParts,
  *,
  sampler: core.ItemSampler,
  drops: drops_lib.DropCounter,
  learner_version: Callable[[], int],
  on_item: Callable[[], None] = lambda: None,
  admission: admission_lib.Admission | None = None,
  group: group_lib.Group | None = None,
) -> feed_lib.Feed:
  """The feed from a sampler to the mesh; call `start` on it."""
  make = feed_lib.Feed
  if group is not None and group.size > 1:
    make = functools.partial(group_feed.GroupFeed, group=group)
  return make(
    sampler,
    packer_lib.Packer(
      buckets=parts.buckets,
      columns=agent.columns,
      window=config.batch.packing_window,
      max_trajectories=(
        0 if admission is None else config.trajectories_per_update
      ),
      num_shards=mesh_lib.num_batch_shards(parts.mesh)
      // processes.num_processes(parts.mesh),
    ),
    bound=make_bound(config),
    drops=drops,
    place=lambda batch: _place(batch, parts.mesh, parts.batch_spec),
    learner_version=learner_version,
    prefetch_batches=config.batch.prefetch_batches,
    on_item=on_item,
    admission=admission,
  )


def make_permit_table(
  config: config_lib.ExperimentConfig, addresses: Sequence[str]
) -> Any:
  """The learner's end of the table of permits; None without admission."""
  if not config.replay.admission:
    return None
  return clients.make_permit_table(addresses)


def make_permit_source(
  config: config_lib.ExperimentConfig, address: str
) -> core.PermitSource | None:
  """Where an actor's permits come from; None without admission."""
  if not config.replay.admission:
    return None
  return clients.make_permit_source(address)


def make_admission(
  config: config_lib.ExperimentConfig,
  table: core.PermitTable,
  *,
  confirmed_version: Callable[[], int],
  drops: drops_lib.DropCounter,
  watchdog: watchdog_lib.Watchdog,
) -> admission_lib.Admission:
  """The learner's side of admission; call `start` on it."""
  size = config.transformer.group_size  # One permit for each group.
  return admission_lib.Admission(
    table,
    trajectories_per_update=config.trajectories_per_update // size,
    max_policy_lag=config.staleness.max_policy_lag,
    num_permits=config.trajectories_in_flight // size,
    lease_s=config.replay.permit_lease_s,
    publish_period=config.learner.publish_period,
    confirmed_version=confirmed_version,
    drops=drops,
    on_live_lease=watchdog.progress,
    waiting=watchdog.waiting,
  )


def make_drop_counter() -> drops_lib.DropCounter:
  """Counts drops by the causes that the metrics name."""
  return drops_lib.DropCounter(metrics_lib.DROP_CAUSES)


def make_learner(
  config: config_lib.ExperimentConfig,
  parts: LearnerParts,
  *,
  batches: Iterator[types.PackedBatch | None],
  drops: drops_lib.DropCounter,
  publisher: publisher_lib.Publisher | None = None,
  admission: admission_lib.Admission | None = None,
  group: group_lib.Group | None = None,
  on_report: Callable[[Mapping[str, float], int], None] | None = None,
) -> learner_lib.PackedLearner:
  """The learner over any iterator of packed batches."""
  return learner_lib.PackedLearner(
    state=parts.state,
    updates=parts.updates,
    batches=batches,
    bound=make_bound(config),
    drops=drops,
    publisher=publisher,
    admission=admission,
    group=group,
    limits=learner_lib.RunLimits(
      publish_period=config.learner.publish_period,
      max_non_finite_updates=config.learner.max_non_finite_updates,
    ),
    on_report=on_report,
  )


def load_variables(
  config: config_lib.ExperimentConfig,
  agent: agent_lib.Agent,
  directory: pathlib.Path,
) -> types.Variables:
  """The params of a run's newest loadable learner checkpoint.

  Args:
    config: the run's config.
    agent: its specs.
    directory: the run directory, or its checkpoints/learner.

  Raises:
    errors.CheckpointError: there is none that can be loaded.
  """
  if checkpoint_dir(directory).is_dir():
    directory = checkpoint_dir(directory)
  mesh = mesh_lib.make_mesh(jax.devices()[:1], data=1)
  checkpointer = checkpoints.LearnerCheckpointer(directory, max_to_keep=1)
  try:
    state, metadata = checkpointer.restore_latest(
      update_lib.abstract_state(
        agent.make_objective(config, mesh), _optimiser(config.learner), mesh
      )
    )
  finally:
    checkpointer.close(timeout_s=1.0)
  return types.Variables(
    policy_version=int(metadata['policy_version']),
    params=jax.tree_util.tree_map(np.array, state.params),
  )


def checkpoint_dir(run_dir: pathlib.Path) -> pathlib.Path:
  """Where the learner of a run keeps its checkpoints."""
  return run_dir / 'checkpoints' / 'learner'


def _optimiser(
  learner: learner_config.LearnerConfig,
) -> optimiser_lib.Optimiser:
  return optimiser_lib.make_optimiser(
    learning_rate=learner.learning_rate,
    learning_rate_end=learner.learning_rate_end,
    decay_steps=learner.learning_rate_decay_steps * learner.updates_per_batch,
    max_grad_norm=learner.max_grad_norm,
  )
