"""Reads the metrics of every role while they are being written."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

from tunix_reverb.telemetry import logger


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of a metrics file.

  Attributes:
    time_s: wall-clock seconds when it was written.
    role: name of the process, such as `actor_0`.
    step: the role's own step.
    values: by metric name.
  """

  time_s: float
  role: str
  step: int
  values: Mapping[str, float]


class Reader:
  """Follows `<run_dir>/metrics/*.jsonl`; a half-written last line waits."""

  def __init__(self, run_dir: pathlib.Path, *, from_end: bool = False):
    """Creates a reader.

    Args:
      run_dir: the run directory; its metrics folder may not exist yet.
      from_end: skip what the files hold now, as when a run is resumed.
    """
    self._directory = pathlib.Path(run_dir) / 'metrics'
    self._offsets: dict[pathlib.Path, int] = {}
    self.bad_lines = 0
    if from_end:
      self._offsets = {path: path.stat().st_size for path in self._paths()}

  def poll(self) -> list[Row]:
    """The rows that are new since the last call, file by file, in order."""
    rows = []
    for path in self._paths():
      rows += self._read(path)
    return rows

  def _paths(self) -> list[pathlib.Path]:
    return sorted(self._directory.glob('*.jsonl'))

  def _read(self, path: pathlib.Path) -> list[Row]:
    offset = self._offsets.get(path, 0)
    if path.stat().st_size <= offset:
      return []
    with path.open('rb') as file:
      file.seek(offset)
      data = file.read()
    complete = data.rpartition(b'\n')[0]
    self._offsets[path] = offset + len(complete) + bool(b'\n' in data)
    rows = [self._parse(line) for line in complete.split(b'\n') if line]
    return [row for row in rows if row is not None]

  def _parse(self, line: bytes) -> Row | None:
    try:
      fields: dict[str, Any] = json.loads(line)
      return Row(
        time_s=float(fields['time_s']),
        role=str(fields['role']),
        step=int(fields['step']),
        values={
          name: float(value)
          for name, value in fields.items()
          if name not in logger.RESERVED
        },
      )
    except (ValueError, KeyError, TypeError, AttributeError):
      self.bad_lines += 1  # Cut off by a crash or by a full disk.
      return None
