"""A learner run: feed, updates, publishing, reports and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
import time
from typing import Any

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb.agents.vtrace import builder
from tunix_reverb.agents.vtrace import config as config_lib
from tunix_reverb.learner import checkpoints
from tunix_reverb.learner import publisher as publisher_lib
from tunix_reverb.telemetry import compiles
from tunix_reverb.telemetry import logger as logger_lib
from tunix_reverb.telemetry import milestones as milestones_lib
from tunix_reverb.telemetry import watchdog as watchdog_lib

_CHECKPOINT_DEADLINE_S = 6.0
_PUBLISH_DEADLINE_S = 30.0


class LearnerSession:
  """One learner from its start, or its latest checkpoint, to its end."""

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    agent: builder.AgentSpec,
    parts: builder.LearnerParts,
    *,
    sampler: core.ItemSampler,
    publisher: publisher_lib.Publisher,
    logger: logger_lib.MetricLogger,
    watchdog: watchdog_lib.Watchdog,
    milestones: milestones_lib.Milestones,
    compile_counter: compiles.CompileCounter,
    run_dir: pathlib.Path | None,
  ):
    """Wires the learner; nothing runs before `run`."""
    self._config = config
    self._logger = logger
    self._watchdog = watchdog
    self._milestones = milestones
    self._compiles = compile_counter
    self._publisher = publisher
    self._drops = builder.make_drop_counter()
    self._feed = builder.make_feed(
      config,
      agent,
      parts,
      sampler=sampler,
      drops=self._drops,
      learner_version=lambda: self.learner.policy_version,
      on_item=watchdog.progress,
    )
    self.learner = builder.make_learner(
      config,
      parts,
      batches=self._feed,
      drops=self._drops,
      publisher=publisher,
      on_report=self._report,
    )
    self._checkpointer = _make_checkpointer(config, run_dir)
    self._saved_step = 0
    self._saved_s = time.monotonic()
    self._checkpoint_s = 0.0
    self._first_report = True

  def run(self) -> None:
    """Restores, publishes the first variables, learns to the last step."""
    self._restore()
    if not self.learner.publish(wait_s=_PUBLISH_DEADLINE_S):
      raise errors.DeadlineExceededError(
        'learner waited for the replay server to confirm its first variables '
        f'for {_PUBLISH_DEADLINE_S} s'
      )
    self._milestones.mark('published its first variables')
    self._compiles.mark_warm()
    self._feed.start()
    last = self._config.learner.max_learner_steps
    self.learner.run(max(0, last - self.learner.learner_step))

  def stop(self) -> None:
    """Makes `run` return soon; safe from any thread."""
    self.learner.stop()

  def close(self) -> None:
    """Stops the feed and writes the last checkpoint."""
    self._feed.close()
    if self._checkpointer is None:
      return
    try:
      if self.learner.learner_step != self._saved_step:
        self._save()
      self._checkpointer.wait(_CHECKPOINT_DEADLINE_S)
      print(f'learner: saved learner step {self._saved_step}', flush=True)
    finally:
      self._checkpointer.close(timeout_s=1.0)

  def _restore(self) -> None:
    if self._checkpointer is None:
      return
    if not self._checkpointer.steps():
      return
    state, metadata = self._checkpointer.restore_latest(self.learner.state)
    self.learner.restore(state)
    self.learner.policy_version = int(metadata['policy_version'])
    self.learner.report.transitions_total = int(metadata['transitions_total'])
    self._saved_step = self.learner.learner_step
    self._milestones.mark(
      f'resumed from learner step {self.learner.learner_step}'
    )

  def _report(self, metrics: Mapping[str, Any], learner_step: int) -> None:
    self._watchdog.progress()
    if self._first_report:
      self._first_report = False
      self._milestones.mark('learns')
    period_s = self._config.learner.learner_checkpoint_period_s
    if period_s and time.monotonic() - self._saved_s >= period_s:
      self._save()
    self._logger.write(
      {
        **metrics,
        'recompiles_total': self._compiles.recompiles,
        'compile_s': self._compiles.compile_s,
        'checkpoint_s': self._checkpoint_s,
      },
      learner_step,
    )

  def _save(self) -> None:
    """Starts a checkpoint; a full disk is told, and training goes on."""
    began_s = time.monotonic()
    learner = self.learner
    try:
      self._checkpointer.save(
        learner.learner_step,
        learner.state,
        metadata={
          'policy_version': learner.policy_version,
          'transitions_total': learner.report.transitions_total,
          'config': config_lib.to_flat(self._config),
        },
      )
      self._saved_step = learner.learner_step
    except errors.CheckpointError as e:
      print(f'warning: {e}', flush=True)
    self._saved_s = time.monotonic()
    self._checkpoint_s = self._saved_s - began_s


def _make_checkpointer(
  config: config_lib.ExperimentConfig, run_dir: pathlib.Path | None
) -> checkpoints.LearnerCheckpointer | None:
  if run_dir is None:
    return None
  return checkpoints.LearnerCheckpointer(
    builder.checkpoint_dir(run_dir),
    max_to_keep=config.learner.learner_checkpoints_to_keep,
  )
