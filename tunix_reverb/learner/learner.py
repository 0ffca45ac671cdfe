"""The learner: batches in, variables out, without pause.

Letters: N trajectories of a batch, B rows, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.learner import admission as admission_lib
from tunix_reverb.learner import feed as feed_lib
from tunix_reverb.learner import group as group_lib
from tunix_reverb.learner import publisher as publisher_lib
from tunix_reverb.learner import report as report_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.sharding import processes
from tunix_reverb.staleness import bound as bound_lib
from tunix_reverb.telemetry import drops as drops_lib
from tunix_reverb.telemetry import timing

# (state, batch) -> (state, metrics), compiled for one bucket.
CompiledUpdate = Callable[[Any, types.Batch], tuple[Any, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLimits:
  """When a learner publishes, reports and gives up.

  Attributes:
    publish_period: learner steps between publishes.
    max_non_finite_updates: skipped updates in a row that end the run.
    report_period_s: seconds between reports.
  """

  publish_period: int = 1
  max_non_finite_updates: int = 10
  report_period_s: float = 1.0


class PackedLearner(core.Learner):
  """Updates on packed batches from any iterator.

  The iterator may be `feed.Feed` or someone else's: it yields
  `types.PackedBatch`, with arrays on the host or on the devices, or None when
  no batch came in time.
  """

  def __init__(
    self,
    *,
    state: Any,
    updates: Mapping[int, CompiledUpdate],
    batches: Iterator[types.PackedBatch | None],
    bound: bound_lib.StalenessBound,
    drops: drops_lib.DropCounter,
    publisher: publisher_lib.Publisher | None = None,
    limits: RunLimits = RunLimits(),
    policy_version: int = 0,
    admission: admission_lib.Admission | None = None,
    group: group_lib.Group | None = None,
    on_report: Callable[[Mapping[str, float], int], None] | None = None,
  ):
    """Starts from `state`.

    Args:
      state: `update.LearnerState` on the mesh.
      updates: the compiled update of each bucket, by row length L.
      batches: where batches come from.
      bound: checked once more when a batch is handed to the update.
      drops: counts what that check drops.
      publisher: where variables go; None publishes nothing.
      limits: periods and limits.
      policy_version: version published last.
      admission: gets the permits of what was learnt back, and says when the
        next version may be published; None always lets it.
      group: the processes of this learner, all of which must call the same
        methods in the same order; None for this one alone.
      on_report: takes (metrics, learner_step) every `report_period_s`.
    """
    self._state = state
    self._updates = dict(updates)
    self._batches = batches
    self._bound = bound
    self._drops = drops
    self._publisher = publisher
    self._limits = limits
    self._admission = admission
    self._on_report = on_report
    self._stopped = False
    self._next_report_s = 0.0
    # The step after which the params were published, as `policy_version`.
    self._published_step = -1
    self.policy_version = policy_version
    self.learner_step = int(state.learner_step)
    self.account = timing.TimeAccount('compute', 'waiting', 'publishing')
    self._group = group or group_lib.Group()
    self.report = report_lib.LearnerReport(
      drops, self.account, num_processes=self._group.size
    )
    self._vote()

  def _vote(self) -> None:
    vote = self._group.vote
    vote('stop', lambda: self._stopped)
    vote('report', lambda: time.monotonic() >= self._next_report_s)
    vote(
      'publish', lambda: self._publisher is not None and self._publisher.idle
    )
    vote('policy_version', lambda: self.policy_version)
    vote('learner_step', lambda: self.learner_step)
    vote('transitions', lambda: self.report.learnt_here)

  @property
  def state(self) -> Any:
    """The learner state on the mesh."""
    return self._state

  def step(self) -> Mapping[str, float] | None:
    """See base class; the metrics are device scalars."""
    with self.account.measure('waiting'):
      packed = next(self._batches)
    if packed is None:
      return None
    now_s = time.time()
    permit_id = packed.segments.permit_id
    packed = self._screen(packed, now_s)
    if packed is None:
      self._finish(permit_id, publish=False)
      return None
    update = self._updates.get(packed.bucket)
    if update is None:
      raise ValueError(
        f'bucket ({packed.bucket}) must be one of '
        f'{sorted(self._updates)}; the batch fits no compiled update'
      )
    with self.account.measure('compute'), self._group.computing():
      self._state, metrics = update(self._state, packed.batch)
      jax.block_until_ready(metrics)
    self.learner_step += 1
    self.report.add(packed, self.policy_version, now_s)
    self.report.set_elsewhere(sum(self._group.others('transitions')))
    is_due = self.learner_step % self._limits.publish_period == 0
    if self._finish(permit_id, publish=is_due):
      self.publish()
    return metrics

  def run(self, num_learner_steps: int | None = None) -> None:
    """See base class; also ends when the iterator of batches does.

    Raises:
      errors.NonFiniteError: too many updates in a row were skipped.
    """
    target = (
      None
      if num_learner_steps is None
      else self.learner_step + num_learner_steps
    )
    self._next_report_s = time.monotonic() + self._limits.report_period_s
    metrics: Mapping[str, Any] | None = None
    while not self._group.any('stop') and (
      target is None or self.learner_step < target
    ):
      try:
        metrics = self.step() or metrics
      except StopIteration:  # Someone else's data may be finite.
        break
      if self._group.first('report'):
        self._next_report_s = time.monotonic() + self._limits.report_period_s
        self._report(metrics)
    self._report(metrics)

  def stop(self) -> None:
    """Makes `run` return after the step under way; safe from any thread."""
    self._stopped = True

  def publish(self, wait_s: float = 0.0) -> bool:
    """Publishes the params as the next version if the last one is through.

    Args:
      wait_s: waits this long for it to be confirmed, seconds.

    Returns:
      Whether a version was published (and confirmed, with `wait_s`).
    """
    with self.account.measure('publishing'):
      if wait_s:
        self._group.agree()
      if not self._group.first('publish'):
        return False
      self.policy_version += 1
      self._published_step = self.learner_step
      # A copy: the next update overwrites the donated buffers.
      with self._group.computing():
        params = processes.to_first(self._state.params)
      if self._publisher is None:
        return True
      self._publisher.offer(types.Variables(self.policy_version, params))
      return self._publisher.wait(wait_s) if wait_s else True

  def get_variables(self, names: Sequence[str] = ()) -> list[types.Nest]:
    """See base class; the only name is 'params'."""
    unknown = set(names) - {'params'}
    if unknown:
      raise ValueError(f'names ({sorted(unknown)}) must be of: params')
    return [jax.tree_util.tree_map(np.array, self._state.params)]

  def save(self) -> types.Nest:
    """See base class."""
    return jax.tree_util.tree_map(np.array, self._state)

  def restore(self, state: types.Nest) -> None:
    """See base class; takes arrays of the host or of the mesh."""
    self._state = jax.tree_util.tree_map(
      lambda new, old: jax.device_put(new, old.sharding), state, self._state
    )
    self.learner_step = int(self._state.learner_step)

  def _finish(self, permit_id: np.ndarray, *, publish: bool) -> bool:
    """Gives permits back; returns whether to publish, if that is due."""
    if self._admission is None:
      return publish
    return self._admission.finish(
      permit_id,
      learner_step=self.learner_step,
      publish=publish and self._publisher is not None and self._publisher.idle,
    )

  def _screen(
    self, packed: types.PackedBatch, now_s: float
  ) -> types.PackedBatch | None:
    """The last look: marks what is too old, and what the params have acted.

    Returns:
      None if all of it is too old.
    """
    segments = packed.segments
    if self._published_step == self.learner_step:
      packed = self._mark(
        packed, 'is_current', segments.policy_version == self.policy_version
      )
    causes = self._bound.causes(
      segments.policy_version,
      segments.created_at_s,
      learner_version=self.policy_version,
      now_s=now_s,
    )
    if not causes.any():
      return packed
    feed_lib.count_drops(self._drops, causes, segments.length)
    fresh = causes == bound_lib.FRESH
    if not fresh.any() and self._group.size == 1:
      return None  # Of several processes, another may have fresh ones.
    packed = self._mark(packed, 'is_rejected', ~fresh)
    return dataclasses.replace(packed, segments=_select(segments, fresh))

  def _mark(
    self, packed: types.PackedBatch, column: str, chosen: np.ndarray
  ) -> types.PackedBatch:
    """Makes a bool column True on the transitions of `chosen`, bool [N]."""
    like = getattr(packed.batch, column)
    if isinstance(like, tuple) or not chosen.any():
      return packed
    segments = packed.segments
    rows, length = packed.batch.segment_ids.shape
    mark = np.zeros((rows // self._group.size, length), np.bool_)
    for row, start, length in zip(
      segments.row[chosen], segments.start[chosen], segments.length[chosen]
    ):
      mark[row, start : start + length] = True
    marked = {column: processes.like(mark, like)}
    return dataclasses.replace(packed, batch=packed.batch._replace(**marked))

  def _report(self, metrics: Mapping[str, Any] | None) -> None:
    if metrics is None:
      return
    values = {name: float(value) for name, value in metrics.items()}
    if not values.get('mismatch_transitions'):
      # Nothing was measured: 0 would say that all is well.
      for name in update_lib.MISMATCH_NAMES:
        values.pop(name, None)
    if self._on_report is not None:
      self._on_report(
        {
          **values,
          **self.report.take(),
          'non_finite_updates_total': float(self._state.non_finite_total),
          'learner_step': float(self.learner_step),
          'policy_version': float(self.policy_version),
        },
        self.learner_step,
      )
    in_a_row = values.get('non_finite_updates', 0)
    if in_a_row >= self._limits.max_non_finite_updates:
      raise errors.NonFiniteError(
        f'non_finite_updates ({in_a_row:.0f}) in a row must stay below '
        f'max_non_finite_updates ({self._limits.max_non_finite_updates}): '
        'lower the learning rate or check the rewards for NaN'
      )


def _select(segments: types.Segments, keep: np.ndarray) -> types.Segments:
  return types.Segments(
    **{
      field.name: getattr(segments, field.name)[keep]
      for field in dataclasses.fields(segments)
    }
  )
