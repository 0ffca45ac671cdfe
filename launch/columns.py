"""Where a replay server has its columns from: the environment, or the learner.

An environment may need another Python than dm-reverb has. The learner, which
makes it anyway, then leaves its columns in the run directory.
"""

from __future__ import annotations

import pathlib
from typing import Any

from absl import flags

FILE = 'columns.json'


def define_flag() -> None:
  """Defines `--columns_file`, of the replay server."""
  flags.DEFINE_string(
    'columns_file',
    None,
    'The columns of an item, which the learner writes into its run_dir as '
    f'{FILE}; without it they are found out by making the environment.',
  )


def write(run_dir: pathlib.Path, columns: Any) -> None:
  """Leaves `Trajectories` of `ColumnSpec` in the run directory."""
  from tunix_reverb.replay import columns_file

  columns_file.write(run_dir / FILE, columns)


def find(context: Any) -> Any:
  """The columns of this server's run.

  Returns:
    `Trajectories` of `ColumnSpec`; None if told to stop before they are known.

  Raises:
    errors.UserError: the file does not come, or is something else.
  """
  if not flags.FLAGS.columns_file:
    from tunix_reverb.agents import builder

    return builder.make_agent(context.config).columns
  from tunix_reverb.replay import columns_file

  path = pathlib.Path(flags.FLAGS.columns_file)
  with context.watchdog.waiting(f'{context.role} waits for {path}'):
    return columns_file.wait(path, context.config.watchdog_s, context.stop)
