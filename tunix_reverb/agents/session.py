"""A learner run: feed, updates, publishing, reports and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
import time
from typing import Any

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb.agents import agent as agent_lib
from tunix_reverb.agents import builder
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents import flat
from tunix_reverb.learner import checkpoints
from tunix_reverb.learner import group as group_lib
from tunix_reverb.learner import learner as learner_lib
from tunix_reverb.learner import publisher as publisher_lib
from tunix_reverb.sharding import processes
from tunix_reverb.telemetry import compiles
from tunix_reverb.telemetry import logger as logger_lib
from tunix_reverb.telemetry import milestones as milestones_lib
from tunix_reverb.telemetry import watchdog as watchdog_lib

# Of the last checkpoint of a learner that was told to stop, which has 10 s.
_STOPPED_DEADLINE_S = 6.0
# And of one that has come to its end: large models take their time.
_COMPLETE_DEADLINE_S = 600.0
_PUBLISH_DEADLINE_S = 30.0
_LAST_PUBLISH_DEADLINE_S = 5.0
# What each of several learner processes reports of itself.
_OWN_METRICS = (
  'age_s',
  'checkpoint_s',
  'compile_s',
  'dropped_',
  'policy_lag',
  'recompiles_total',
  'utilisation_',
)


class LearnerSession:
  """One learner from its start, or its latest checkpoint, to its end."""

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    agent: agent_lib.Agent,
    parts: builder.LearnerParts,
    *,
    sampler: core.ItemSampler,
    publisher: publisher_lib.Publisher | None,
    logger: logger_lib.MetricLogger,
    watchdog: watchdog_lib.Watchdog,
    milestones: milestones_lib.Milestones,
    compile_counter: compiles.CompileCounter,
    run_dir: pathlib.Path | None,
    served_version: int = 0,
    permit_table: core.PermitTable | None = None,
    group: group_lib.Group | None = None,
  ):
    """Wires the learner; nothing runs before `run`.

    Args:
      config: of the run.
      agent: its specs.
      parts: the compiled update and the fresh state.
      sampler: where items come from.
      publisher: where variables go; None in all processes but the first.
      logger: writes the metrics.
      watchdog: is told of every item and report.
      milestones: is told how far the learner has got.
      compile_counter: counted every compile of this process.
      run_dir: holds the checkpoints; None keeps none.
      served_version: version of the variables that actors may hold, of a
        learner that died after its last checkpoint: ours come after it.
      permit_table: where permits go, with admission.
      group: the processes of this learner; None for this one alone.
    """
    self._config = config
    self._sampler = sampler
    self._publisher = publisher
    self._group = group or group_lib.Group()
    self._served_version = served_version
    self._is_stopped = False
    self._logger = logger
    self._watchdog = watchdog
    self._milestones = milestones
    self._compiles = compile_counter
    self._drops = builder.make_drop_counter()
    self._admission = self._make_admission(permit_table)
    self._feed = self._make_feed(agent, parts)
    self.learner = self._make_learner(parts)
    self._checkpoints = (
      None
      if run_dir is None
      else _Checkpoints(config, run_dir, self.learner, self._group)
    )

  def _make_feed(self, agent: Any, parts: builder.LearnerParts) -> Any:
    return builder.make_feed(
      self._config,
      agent,
      parts,
      sampler=self._sampler,
      drops=self._drops,
      learner_version=lambda: self.learner.policy_version,
      on_item=self._watchdog.progress,
      admission=self._admission,
      group=self._group,
    )

  def _make_learner(
    self, parts: builder.LearnerParts
  ) -> learner_lib.PackedLearner:
    return builder.make_learner(
      self._config,
      parts,
      batches=self._feed,
      drops=self._drops,
      publisher=self._publisher,
      admission=self._admission,
      group=self._group,
      on_report=self._report,
    )

  def _make_admission(self, table: core.PermitTable | None) -> Any:
    if table is None:
      return None
    return builder.make_admission(
      self._config,
      table,
      confirmed_version=lambda: self._publisher.confirmed_version,
      drops=self._drops,
      watchdog=self._watchdog,
    )

  @property
  def is_complete(self) -> bool:
    """Whether `max_learner_steps` are done."""
    return self.learner.learner_step >= self._config.learner.max_learner_steps

  def run(self) -> None:
    """Restores, publishes the first variables, learns to the last step."""
    self._restore()
    learner = self.learner
    learner.policy_version = max(learner.policy_version, self._served_version)
    self._agree_on_start()
    if not self.learner.publish(wait_s=_PUBLISH_DEADLINE_S):
      raise errors.DeadlineExceededError(
        'learner waited for the replay server to confirm its first variables '
        f'for {_PUBLISH_DEADLINE_S} s'
      )
    self._milestones.mark('published its first variables')
    self._compiles.mark_warm()
    if self._admission is not None:
      self._admission.start(
        policy_version=learner.policy_version, learner_step=learner.learner_step
      )
    self._feed.start()
    last = self._config.learner.max_learner_steps
    if self.learner.learner_step < last:
      self.learner.run(1)
      self._milestones.mark('learnt its first batch')
      self.learner.run(last - self.learner.learner_step)
    if self.is_complete:
      # Whatever the period, the last evaluation is of the last params.
      if self._publisher is not None:
        self._publisher.wait(_LAST_PUBLISH_DEADLINE_S)
      self.learner.publish(wait_s=_LAST_PUBLISH_DEADLINE_S)

  def _agree_on_start(self) -> None:
    """Makes sure that all processes of the learner start from the same state.

    Raises:
      errors.CheckpointError: they have restored different ones.
    """
    self._group.agree()
    steps = self._group.all('learner_step')
    if len(set(steps)) > 1:
      raise errors.CheckpointError(
        f'the learner processes start from different learner steps ({steps}): '
        'run_dir must be a directory that all of them share'
      )
    self.learner.policy_version = self._group.first('policy_version')
    if self._group.size > 1:
      processes.compile_barrier()

  def stop(self) -> None:
    """Makes `run` return soon; safe from any thread."""
    self._is_stopped = True
    self.learner.stop()

  def close(self) -> str:
    """Stops the feed and writes the last checkpoint.

    Returns:
      Why the last checkpoint could not be written; '' if it was.
    """
    self._feed.close()
    if self._admission is not None:
      self._admission.close()
    self._drops.set_unread('poison', self._sampler.poison_items)
    # What was dropped since the last report, at the shutdown for one.
    self._write(
      {
        **self.learner.report.drops(),
        'learner_step': float(self.learner.learner_step),
        'policy_version': float(self.learner.policy_version),
      },
      self.learner.learner_step,
    )
    if self._checkpoints is None:
      return ''
    deadline_s = _COMPLETE_DEADLINE_S
    if self._is_stopped or not self.is_complete:
      deadline_s = _STOPPED_DEADLINE_S
    with self._watchdog.waiting('learner waits for its last checkpoint'):
      return self._checkpoints.close(deadline_s)

  def _restore(self) -> None:
    if self._checkpoints is not None and self._checkpoints.restore():
      self._milestones.mark(
        f'resumed from learner step {self.learner.learner_step}'
      )

  def _report(self, metrics: Mapping[str, Any], learner_step: int) -> None:
    self._watchdog.progress()
    self._drops.set_unread('poison', self._sampler.poison_items)
    checkpoint_s = 0.0
    if self._checkpoints is not None:
      self._checkpoints.save_if_due()
      checkpoint_s = self._checkpoints.blocked_s
    self._write(
      {
        **metrics,
        **({} if self._admission is None else self._admission.metrics()),
        'recompiles_total': self._compiles.recompiles,
        'compile_s': self._compiles.compile_s,
        'checkpoint_s': checkpoint_s,
        'publish_s': self._publisher.publish_s if self._publisher else 0.0,
      },
      learner_step,
    )

  def _write(self, metrics: Mapping[str, Any], learner_step: int) -> None:
    """Writes metrics; what the first process tells for all, it alone tells."""
    if self._group.index:
      metrics = {
        name: value
        for name, value in metrics.items()
        if name.startswith(_OWN_METRICS)
      }
    self._logger.write(metrics, learner_step)


class _Checkpoints:
  """Checkpoints of one learner, by period and at its end.

  Attributes:
    blocked_s: seconds the last save held up the learner.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    run_dir: pathlib.Path,
    learner: learner_lib.PackedLearner,
    group: group_lib.Group,
  ):
    self._config = config
    self._learner = learner
    self._group = group
    self._checkpointer = checkpoints.LearnerCheckpointer(
      builder.checkpoint_dir(run_dir),
      max_to_keep=config.learner.learner_checkpoints_to_keep,
    )
    group.vote('save', self._is_due)
    self._step: int | None = 0  # Of the last save; None if it failed.
    self._at_s = time.monotonic()
    self.blocked_s = 0.0

  def restore(self) -> bool:
    """Takes over the newest checkpoint; returns whether there was one."""
    if not self._checkpointer.steps():
      return False
    learner = self._learner
    state, metadata = self._checkpointer.restore_latest(learner.state)
    learner.restore(state)
    learner.policy_version = int(metadata['policy_version'])
    learner.report.transitions_total = int(metadata['transitions_total'])
    self._step = learner.learner_step
    return True

  def save_if_due(self) -> None:
    """Saves once per period."""
    if self._group.first('save'):
      error = self._save()
      if error:  # Training goes on; the next one tries anew.
        print(f'warning: {error}', flush=True)

  def _is_due(self) -> bool:
    period_s = self._config.learner.learner_checkpoint_period_s
    if not period_s or time.monotonic() - self._at_s < period_s:
      return False
    if self._checkpointer.is_saving:
      return False
    error = self._wait(time.monotonic())  # Of the one before.
    if error:
      print(f'warning: {error}', flush=True)
    return True

  def close(self, timeout_s: float) -> str:
    """Saves what the last checkpoint lacks; waits until it is on disk.

    Args:
      timeout_s: for as long as this.

    Returns:
      Why it could not be saved; '' if it was.
    """
    until_s = time.monotonic() + timeout_s
    error = self._wait(until_s)
    if error or self._learner.learner_step != self._step:
      error = self._save() or self._wait(until_s)
    if not error:
      self._checkpointer.close(timeout_s=1.0)
      step = self._learner.learner_step
      print(f'learner: saved learner step {step}', flush=True)
    return error

  def _wait(self, until_s: float) -> str:
    """Waits for the save under way; returns why it failed, or ''."""
    try:
      self._checkpointer.wait(max(0.0, until_s - time.monotonic()))
    except (errors.CheckpointError, errors.DeadlineExceededError) as e:
      self._step = None
      return str(e)
    return ''

  def _save(self) -> str:
    """Starts a checkpoint; returns why that failed, or ''."""
    self._at_s = time.monotonic()
    learner = self._learner
    try:
      started = self._checkpointer.save(
        learner.learner_step,
        learner.state,
        metadata={
          'policy_version': learner.policy_version,
          'transitions_total': learner.report.transitions_total,
          'config': flat.to_flat(self._config),
        },
      )
    except errors.CheckpointError as e:
      self._step = None
      return str(e)
    finally:
      self.blocked_s = time.monotonic() - self._at_s
    if started:
      self._step = learner.learner_step
    return ''
