"""Writes a role's metrics as JSON lines and as TensorBoard events."""

from __future__ import annotations

from collections.abc import Mapping
import json
import math
import os
import pathlib
import sys
import threading
import time
from typing import Any

from tunix_reverb.telemetry import metrics

# Keys of a line besides the metrics.
RESERVED = ('time_s', 'role', 'step')


class MetricLogger:
  """Appends to `<run_dir>/metrics/<role>.jsonl` and `tensorboard/<role>/`.

  A full or broken disk costs one warning, not the training. Both files are
  written in the caller's thread: there is no thread to lose or to wait for.
  """

  def __init__(self, run_dir: pathlib.Path | None, role: str):
    """Creates a logger; files appear with the first write.

    Args:
      run_dir: the run directory; None writes nothing.
      role: name of the process, such as `actor_0`.
    """
    self._role = role
    self._lock = threading.Lock()
    self._warned = False
    self._sinks: list[Any] = []
    if run_dir is not None:
      run_dir = pathlib.Path(run_dir)
      self._sinks = [
        _JsonLines(run_dir / 'metrics' / f'{role}.jsonl', role),
        _TensorBoard(run_dir / 'tensorboard' / role),
      ]

  def write(self, values: Mapping[str, float], step: int) -> None:
    """Writes one line and one TensorBoard point per metric.

    Args:
      values: by metric name; numbers or scalar arrays, NaN and infinity too.
      step: what TensorBoard puts on its x axis: learner steps for the learner,
        actor steps for an actor, policy versions for the evaluator.

    Raises:
      ValueError: a name is not in `metrics.METRICS`.
    """
    metrics.check_names(values)
    numbers = {name: float(value) for name, value in values.items()}
    time_s = time.time()
    with self._lock:
      for sink in self._sinks:
        try:
          sink.write(numbers, int(step), time_s)
        except OSError as e:
          self._warn(e)

  def close(self) -> None:
    """Flushes and closes the files; idempotent."""
    with self._lock:
      for sink in self._sinks:
        try:
          sink.close()
        except OSError as e:
          self._warn(e)
      self._sinks = []

  def _warn(self, error: OSError) -> None:
    if not self._warned:
      self._warned = True
      print(
        f'warning: {self._role}: metrics cannot be written ({error}); '
        'training goes on without them',
        file=sys.stderr,
        flush=True,
      )


class _JsonLines:
  """One JSON object per line, each complete on disk when `write` returns."""

  def __init__(self, path: pathlib.Path, role: str):
    self._path = path
    self._role = role
    self._fd = -1
    self._torn = False

  def write(self, numbers: dict[str, float], step: int, time_s: float) -> None:
    if self._fd < 0:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      self._fd = os.open(
        self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644
      )
      self._torn = _ends_within_a_line(self._fd)
    row = {'time_s': round(time_s, 3), 'role': self._role, 'step': step}
    row.update((name, to_json(value)) for name, value in numbers.items())
    line = json.dumps(row, allow_nan=False).encode() + b'\n'
    if self._torn:  # Close the line that a crash or a full disk cut off.
      line = b'\n' + line
    self._torn = True
    if os.write(self._fd, line) != len(line):
      raise OSError(f'no space left for {self._path}')
    self._torn = False

  def close(self) -> None:
    if self._fd >= 0:
      os.close(self._fd)
      self._fd = -1


class _TensorBoard:
  """Scalars, through tensorboardX's own file writer.

  Its `SummaryWriter` would write in a thread that dies on a full disk and
  blocks at exit.
  """

  def __init__(self, directory: pathlib.Path):
    self._directory = directory
    self._writer: Any = None

  def write(self, numbers: dict[str, float], step: int, time_s: float) -> None:
    # Imported here: it takes 0.1 s, and a role's start should not wait for it.
    # pylint: disable=g-import-not-at-top
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2
    from tensorboardX.proto import summary_pb2

    # pylint: enable=g-import-not-at-top
    if self._writer is None:
      self._directory.mkdir(parents=True, exist_ok=True)
      self._writer = event_file_writer.EventsWriter(
        str(self._directory / 'events'), f'.{os.getpid()}'
      )
    self._writer.write_event(
      event_pb2.Event(
        wall_time=time_s,
        step=step,
        summary=summary_pb2.Summary(
          value=[
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in numbers.items()
          ]
        ),
      )
    )
    self._writer.flush()

  def close(self) -> None:
    if self._writer is not None:
      self._writer.close()
      self._writer = None


def to_json(value: float) -> float | str:
  """JSON has no NaN or infinity: they become 'nan', 'inf' and '-inf'."""
  return value if math.isfinite(value) else str(value)


def _ends_within_a_line(fd: int) -> bool:
  size = os.fstat(fd).st_size
  return size > 0 and os.pread(fd, 1, size - 1) != b'\n'
