"""Tasks by name, those of tool:<task>.

copy, reverse[/<most symbols>]            one turn, no tools
lookup[/<answer symbols>[/<call bonus>]]  a tool whose answer none can guess
<module>:<function or class>              a user's own (see `tools.task`)
"""

from __future__ import annotations

from collections.abc import Callable
import difflib
import importlib
import inspect

from tunix_reverb import errors
from tunix_reverb.environments.tasks import calculation
from tunix_reverb.environments.tasks import code
from tunix_reverb.environments.tasks import latency
from tunix_reverb.environments.tasks import lookup
from tunix_reverb.environments.tasks import reasoning
from tunix_reverb.environments.tasks import symbols
from tunix_reverb.environments.tools import task as task_lib

_TASKS: dict[str, Callable[[str, str], task_lib.Task]] = {
  'copy': symbols.make,
  'reverse': symbols.make,
  'lookup': lookup.make,
  'calculator': calculation.make,
  'code': code.make,
  'latency': latency.make,
}


def make(scheme: str, name: str) -> task_lib.Task:
  """Makes a task.

  Args:
    scheme: 'tool', or 'reasoning_gym' for one of its datasets.
    name: such as 'lookup/2' or 'my_module:doubling'.

  Raises:
    errors.UserError: there is none of that name, or its argument is wrong.
    ImportError: it needs a package of the extra 'agents'.
  """
  if scheme == 'reasoning_gym':
    return reasoning.make(name)
  module_name, is_own, attribute = name.partition(':')
  if is_own:
    return _make_own(module_name, attribute)
  task, _, argument = name.partition('/')
  if task not in _TASKS:
    close = difflib.get_close_matches(task, _TASKS, n=1)
    hint = f' (did you mean {close[0]}?)' if close else ''
    raise errors.UserError(
      f'task ({task!r}) must be one of {", ".join(_TASKS)}, or '
      f'<importable module>:<function or class>{hint}'
    )
  return _TASKS[task](task, argument)


def _make_own(module_name: str, attribute: str) -> task_lib.Task:
  """Wraps a user's function, or makes one of a user's class."""
  name = f'{module_name}:{attribute}'
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as e:
    # Not an error inside the user's module, which keeps its traceback.
    if e.name and (module_name + '.').startswith(e.name + '.'):
      raise errors.UserError(
        f'task ({name!r}) must name an importable module: {e}'
      ) from e
    raise
  own = getattr(module, attribute, None)
  if inspect.isclass(own) and issubclass(own, task_lib.Task):
    return own()
  if not callable(own) or inspect.isclass(own):
    raise errors.UserError(
      f'task ({name!r}) must name a function of a generator, or a subclass of '
      f'Task, of the module {module_name}'
    )
  return task_lib.FunctionTask(own)
