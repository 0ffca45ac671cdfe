"""The interpreter of each role: one run may span several environments.

dm-reverb ties its process to old versions of Python and JAX. Here every role
may have an interpreter of its own, and is refused one that cannot run it.
"""

from __future__ import annotations

from collections.abc import Mapping
import concurrent.futures
import dataclasses
import json
import shlex
import subprocess
import sys

from absl import flags

import tunix_reverb
from tunix_reverb import errors
from tunix_reverb.telemetry import metrics

ROLES = (
  metrics.REPLAY_SERVER,
  metrics.LEARNER,
  metrics.ACTOR,
  metrics.EVALUATOR,
)
_PROBE_TIMEOUT_S = 30.0

# For any Python, old ones too; imports nothing that is heavy.
_PROBE = """
import importlib.util, json, sys
def has(name):
  try:
    return importlib.util.find_spec(name) is not None
  except ImportError:
    return False
version = None
if has('tunix_reverb') and has('launch.local'):
  import tunix_reverb
  version = tunix_reverb.__version__
print(json.dumps({'python': '%d.%d.%d' % sys.version_info[:3],
                  'version': version, 'reverb': has('reverb')}))
"""


@dataclasses.dataclass(frozen=True)
class _Facts:
  """What an interpreter says about itself.

  Attributes:
    python: its version, such as '3.12.1'.
    version: of the package there; None if there is none.
    reverb: whether it has dm-reverb.
  """

  python: str
  version: str | None
  reverb: bool


def define_flags() -> None:
  """Defines one flag per kind of role; idempotent."""
  for role in ROLES:
    if flag_name(role) not in flags.FLAGS:
      flags.DEFINE_string(
        flag_name(role),
        None,
        f'Python interpreter of every {role}, such as .venv/bin/python; by '
        'default the one that runs launch.local.',
      )


def flag_name(role: str) -> str:
  """`<role>_python`."""
  return f'{role}_python'


def given() -> dict[str, str]:
  """Interpreters that were named, by role."""
  values = {role: flags.FLAGS[flag_name(role)].value for role in ROLES}
  return {role: value for role, value in values.items() if value}


def resolve(
  named: Mapping[str, str], *, replay_client: str
) -> dict[str, list[str]]:
  """The command that starts Python for each role, checked by running it.

  Args:
    named: interpreters by role; the others run on this one.
    replay_client: of the config.

  Raises:
    errors.UserError: an interpreter does not run, lacks this package, or lacks
      the dm-reverb that its role needs.
  """
  paths = {role: named.get(role, sys.executable) for role in ROLES}
  distinct = sorted(set(paths.values()))
  with concurrent.futures.ThreadPoolExecutor(len(distinct)) as pool:
    answers = dict(zip(distinct, pool.map(_ask, distinct)))
  for role, path in paths.items():
    _check(role, path, answers[path], replay_client)
  return {role: command(path) for role, path in paths.items()}


def command(path: str) -> list[str]:
  """`path` with the option that decides between checkout and installation."""
  return [path, '-P'] if sys.flags.safe_path else [path]


def as_flags(named: Mapping[str, str]) -> str:
  """The flags that name `named`, as one would type them."""
  return ''.join(
    f' --{flag_name(role)}={shlex.quote(path)}' for role, path in named.items()
  )


def _ask(path: str) -> _Facts | str:
  """Runs an interpreter; returns what it says, or why it does not."""
  try:
    result = subprocess.run(
      [*command(path), '-c', _PROBE],
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=_PROBE_TIMEOUT_S,
    )
  except OSError as e:
    return e.strerror
  except subprocess.TimeoutExpired:
    return f'no answer within {_PROBE_TIMEOUT_S:g} s'
  try:
    return _Facts(**json.loads(result.stdout))
  except (ValueError, TypeError):
    said = (result.stderr or result.stdout).strip().splitlines()
    return said[-1] if said else f'it ended with status {result.returncode}'


def _check(
  role: str, path: str, answer: _Facts | str, replay_client: str
) -> None:
  flag = flag_name(role)
  if isinstance(answer, str):
    raise errors.UserError(
      f'{flag} ({path!r}) must be a Python interpreter that runs here: {answer}'
    )
  what = f'{flag} ({path!r}, Python {answer.python})'
  if answer.version != tunix_reverb.__version__:
    found = f'version {answer.version}' if answer.version else 'none'
    raise errors.UserError(
      f'{what} must have tunix_reverb {tunix_reverb.__version__} and has '
      f'{found}; `make wheel` builds it, and `{path} -m pip install` installs '
      'it there'
    )
  if answer.reverb:
    return
  if role == metrics.REPLAY_SERVER:
    raise errors.UserError(
      f'{what} must have dm-reverb, which the server is made of: name an '
      f'interpreter that has, such as --{flag}=.venv/bin/python (`make venv` '
      'makes it)'
    )
  if replay_client == 'official':
    raise errors.UserError(
      f'{what} must have dm-reverb for replay_client (official): use '
      f'--replay_client=wire, or --{flag}= an interpreter that has'
    )
