"""When each role got how far in starting up: where its time goes."""

from __future__ import annotations

import json
import pathlib
import time

_FILE = 'milestones.jsonl'


class Milestones:
  """Appends one line per milestone to `<run_dir>/milestones.jsonl`.

  All roles share the file: each line is one write of a few bytes to a file
  opened for appending, which the kernel keeps whole.
  """

  def __init__(self, run_dir: pathlib.Path | None, role: str):
    """Marks for `role`; without a `run_dir` nothing is written."""
    self._path = run_dir / _FILE if run_dir is not None else None
    self._role = role

  def mark(self, name: str) -> None:
    """Records that milestone `name` is reached now, and says so on stdout."""
    now_s = time.time()
    print(f'{self._role}: {name}', flush=True)
    if self._path is None:
      return
    line = json.dumps({'time_s': now_s, 'role': self._role, 'name': name})
    try:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      with open(self._path, 'a', buffering=1) as f:
        f.write(line + '\n')
    except OSError as e:
      print(f'warning: milestones are not written: {e}', flush=True)


def read(run_dir: pathlib.Path) -> list[dict[str, str | float]]:
  """The milestones of a run, in the order they were reached."""
  path = run_dir / _FILE
  if not path.exists():
    return []
  # A full disk may have cut the last line off.
  lines = [line for line in path.read_text().splitlines() if line.endswith('}')]
  return sorted((json.loads(line) for line in lines), key=lambda m: m['time_s'])
