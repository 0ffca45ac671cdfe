"""An item's columns as a file, for a server that cannot make the environment.

A replay server needs of the environment only the columns that its items have.
Where its interpreter lacks the environment's packages, the learner writes the
columns down and the server reads them.
"""

from __future__ import annotations

import json
import pathlib
import threading
import time

import numpy as np

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types

_POLL_S = 0.1


def write(path: pathlib.Path, columns: types.Trajectories) -> None:
  """Writes `Trajectories` of `ColumnSpec`, in one step for its readers.

  Raises:
    OSError: it cannot be written.
  """
  text = json.dumps(
    {
      name: [spec.shape, spec.dtype.name]
      for name, spec in specs.flatten_columns(columns).items()
    },
    indent=2,
  )
  new = path.with_name(f'.{path.name}.new')
  new.write_text(text + '\n')
  new.replace(path)


def read(path: pathlib.Path) -> types.Trajectories:
  """The columns that `write` wrote.

  Nests come back as flat dicts by path: names, shapes and dtypes are the same,
  and these are all that a table consists of.

  Raises:
    FileNotFoundError: nobody has written it.
    errors.UserError: it is something else.
  """
  fields: dict[str, types.Nest] = {}
  try:
    for name, (shape, dtype) in json.loads(path.read_text()).items():
      field, _, rest = name.partition('/')
      spec = specs.ColumnSpec(tuple(shape), np.dtype(dtype))
      if rest:
        fields.setdefault(field, {})[rest] = spec
      else:
        fields[field] = spec
    empty = dict.fromkeys(types.Trajectories._fields, ())
    return types.Trajectories(**{**empty, **fields})
  except (ValueError, TypeError, AttributeError) as e:
    raise errors.UserError(
      f'columns_file ({str(path)!r}) must be what a learner wrote into its '
      f'run_dir as columns.json: {e}'
    ) from e


def wait(
  path: pathlib.Path, timeout_s: float, stop: threading.Event
) -> types.Trajectories | None:
  """Waits until the columns are written; None if `stop` is set before.

  Raises:
    errors.UserError: not there within `timeout_s`, or something else.
  """
  deadline_s = time.monotonic() + timeout_s
  while not stop.is_set():
    try:
      return read(path)
    except FileNotFoundError as e:
      if time.monotonic() > deadline_s:
        raise errors.UserError(
          f'columns_file ({str(path)!r}) must be written by the learner within '
          f'{timeout_s:g} s: is it running?'
        ) from e
    stop.wait(_POLL_S)
  return None
