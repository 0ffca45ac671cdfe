"""Any environment by one string.

  catch                       the built-in Catch (see `catch`)
  bsuite:<id>                 bsuite, e.g. bsuite:memory_len/0
  gym:<id>                    Gymnasium, e.g. gym:CartPole-v1
  atari:<game>                ale-py, e.g. atari:Pong (see `atari`)
  dm_control:<domain>/<task>  e.g. dm_control:cartpole/balance
  envpool:<id>                envpool, e.g. envpool:CartPole-v1
  tool:<task>                 turns with tools: tool:lookup, tool:reverse/8, or
                              a user's tool:<module>:<function or class> (see
                              `tasks.registry`)
  reasoning_gym:<dataset>     e.g. reasoning_gym:chain_sum/max_terms=2, for a
                              model with a tokeniser of its own
  <module>:<factory>          a user's own: `factory(seed=...)` in an importable
                              module returns a `dm_env.Environment`

Optional libraries are imported when they are asked for, and named by their
extra when they are absent.
"""

from __future__ import annotations

from collections.abc import Callable
import copy
import difflib
import importlib
import inspect
import itertools
import re
import threading
from typing import Any
import warnings

import dm_env
import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import specs as specs_lib
from tunix_reverb.environments import canonical
from tunix_reverb.environments import catch
from tunix_reverb.environments import turn_factory
from tunix_reverb.environments import vector

MODES = ('vectorised', 'asynchronous')
# `warnings.catch_warnings` swaps process-wide state.
_IMPORT_LOCK = threading.Lock()


def make(
  name: str,
  *,
  seed: int,
  turn_options: turn_factory.TurnOptions | None = None,
) -> dm_env.Environment:
  """Makes the environment `name` in canonical form (see `canonical`).

  Args:
    name: see the module's docstring.
    seed: of everything random in it, int >= 0.
    turn_options: of a turn environment; None for those of a model from scratch.

  Raises:
    errors.MissingExtraError: its library is not installed.
    errors.UserError: no such environment, or one that has no canonical form.
  """
  environment = load(name, seed=seed, turn_options=turn_options)
  return canonical.canonicalise(environment)


def load(
  name: str,
  *,
  seed: int,
  turn_options: turn_factory.TurnOptions | None = None,
) -> dm_env.Environment:
  """Like `make`, but as the environment's author made it."""
  if name == 'catch':
    return catch.Catch(seed=seed)
  scheme, separator, rest = name.partition(':')
  if not separator:
    raise _unknown(name, scheme)
  if scheme not in _SCHEMES:
    return _load_own(scheme, rest, seed)
  if not rest:
    raise errors.UserError(
      f'environment ({name!r}) must name one after the colon'
    )
  try:
    if scheme in turn_factory.SCHEMES:
      options = turn_options or turn_factory.TurnOptions()
      return turn_factory.make(name, seed=seed, options=options)
    return _LOADERS[scheme](rest, seed)
  except ImportError as e:
    if scheme not in turn_factory.SCHEMES:
      raise _missing_extra(name, scheme, e) from e
    if ':' in rest:  # A user's own module, which keeps its traceback.
      raise
    raise _missing_extra(name, turn_factory.EXTRA, e) from e


def environment_spec(
  name: str,
  *,
  seed: int = 0,
  turn_options: turn_factory.TurnOptions | None = None,
) -> specs_lib.EnvironmentSpec:
  """The canonical specs of `name`; makes one environment to read them."""
  environment = make(name, seed=seed, turn_options=turn_options)
  try:
    return specs_lib.make_environment_spec(environment)
  finally:
    environment.close()


def make_vector(
  name: str,
  *,
  num_environments: int,
  mode: str = 'vectorised',
  seed: int,
  timeout_s: float = 60.0,
  turn_options: turn_factory.TurnOptions | None = None,
) -> core.VectorEnvironment:
  """Makes `num_environments` of `name` behind one interface of arrays.

  Args:
    name: see the module's docstring.
    num_environments: N.
    mode: 'vectorised' steps all together, in the caller's thread (fast
      environments); 'asynchronous' each in its own thread (slow ones).
    seed: of everything random in them; each gets its own, and so does each
      environment that replaces a failed one.
    timeout_s: seconds an asynchronous environment may take for one step.
    turn_options: of turn environments, which may play in groups.

  Raises:
    errors.MissingExtraError: its library is not installed.
    errors.UserError: no such environment or mode.
  """
  if mode not in MODES:
    raise errors.UserError(
      f'environment_mode ({mode!r}) must be one of {", ".join(MODES)}'
    )
  if num_environments < 1:
    raise errors.UserError(
      f'environments_per_actor ({num_environments}) must be >= 1'
    )
  scheme, _, rest = name.partition(':')
  if scheme == 'envpool':
    return _make_envpool_vector(name, rest, num_environments, mode, seed)
  if scheme in turn_factory.SCHEMES:
    factories = turn_factory.factories(
      name,
      num_environments=num_environments,
      seed=lambda group: derived_seed(seed, group),
      options=turn_options or turn_factory.TurnOptions(),
    )
  else:
    factories = [_factory(name, seed, i) for i in range(num_environments)]
  if mode == 'asynchronous':
    return vector.AsynchronousVectorEnvironment(factories, timeout_s=timeout_s)
  return vector.SynchronousVectorEnvironment(factories)


def derived_seed(seed: int, *path: int) -> int:
  """A seed for the part `path` of something seeded with `seed`, < 2**31."""
  sequence = np.random.SeedSequence([seed, *path])
  return int(sequence.generate_state(1)[0]) >> 1


def _factory(
  name: str, seed: int, index: int
) -> Callable[[], dm_env.Environment]:
  generations = itertools.count()
  return lambda: make(name, seed=derived_seed(seed, index, next(generations)))


def _make_envpool_vector(
  name: str, rest: str, num_environments: int, mode: str, seed: int
) -> core.VectorEnvironment:
  from tunix_reverb.environments import envpool_vector

  if mode != 'vectorised':
    raise errors.UserError(
      f"environment_mode ({mode!r}) must be 'vectorised' for {name}: envpool "
      'steps its environments together'
    )
  try:
    return envpool_vector.EnvpoolVectorEnvironment(
      rest, num_environments=num_environments, seed=derived_seed(seed)
    )
  except ImportError as e:
    raise _missing_extra(name, 'envpool', e) from e


def _load_bsuite(name: str, seed: int) -> dm_env.Environment:
  import bsuite
  from bsuite import sweep

  if name not in sweep.SETTINGS:
    raise _unknown_id('bsuite id', name, sweep.SETTINGS)
  experiment = name.partition('/')[0]
  settings = dict(sweep.SETTINGS[name])
  make_experiment = bsuite.bsuite.EXPERIMENT_NAME_TO_ENVIRONMENT[experiment]
  # Some are not random; what defines the task has seeds of other names.
  if 'seed' in inspect.signature(make_experiment).parameters:
    settings['seed'] = seed
  # Not `load_from_id`, which prints a line each time and fixes the seed.
  try:
    environment = bsuite.load(experiment, settings)
  except OSError as e:
    raise errors.UserError(
      f'bsuite id ({name!r}) must find its data; bsuite could not download '
      f'it: {e}'
    ) from e
  # Its signatures say `action: int`, so Python ints may go straight in.
  environment.step_raw = environment.step
  return environment


def _load_gym(name: str, seed: int) -> dm_env.Environment:
  import gymnasium

  from tunix_reverb.environments import gym_adapter

  try:
    with _IMPORT_LOCK, warnings.catch_warnings():
      # "The environment X is out of date": whoever names a version means it.
      warnings.filterwarnings('ignore', message='.*is out of date.*')
      spec = copy.deepcopy(_gym_spec(gymnasium, name))
    # Two wrappers less around each step: the adapter keeps the order, and
    # counts the steps.
    spec.order_enforce = False
    limit, spec.max_episode_steps = spec.max_episode_steps, None
    environment = gymnasium.make(spec, disable_env_checker=True)
  except gymnasium.error.DependencyNotInstalled as e:
    raise errors.MissingExtraError(
      f'environment (gym:{name}) needs a library of its own: {e}'
    ) from e
  except gymnasium.error.UnregisteredEnv as e:
    raise _unknown_id('gym id', name, gymnasium.registry) from e
  return gym_adapter.GymEnvironment(
    environment, seed=seed, max_episode_steps=limit
  )


def _gym_spec(gymnasium: Any, name: str) -> Any:
  """Gymnasium's spec of `name`, which may be `module:id`."""
  module, separator, _ = name.partition(':')
  if separator:
    try:
      importlib.import_module(module)
    except ModuleNotFoundError as e:
      raise errors.UserError(
        f'gym id ({name!r}) must start with an importable module: {e}'
      ) from e
    name = name.partition(':')[2]
  try:
    return gymnasium.spec(name)
  except gymnasium.error.Error as e:
    if isinstance(e, gymnasium.error.UnregisteredEnv):
      raise
    raise errors.UserError(f'gym id ({name!r}) must be valid: {e}') from e


def _load_atari(name: str, seed: int) -> dm_env.Environment:
  from tunix_reverb.environments import atari

  return atari.make(name, seed=seed)


def _load_dm_control(name: str, seed: int) -> dm_env.Environment:
  with _IMPORT_LOCK, warnings.catch_warnings():
    # On a machine without a display dm_control probes for one and warns. Only
    # rendering needs it, and nothing here renders.
    warnings.filterwarnings('ignore', message='.*DISPLAY.*')
    from dm_control import suite

  known = [f'{domain}/{task}' for domain, task in suite.ALL_TASKS]
  if name not in known:
    raise _unknown_id('dm_control task', name, known)
  domain, _, task = name.partition('/')
  return suite.load(domain, task, task_kwargs={'random': seed})


def _load_envpool(name: str, seed: int) -> dm_env.Environment:
  from tunix_reverb.environments import envpool_vector

  return envpool_vector.EnvpoolEnvironment(name, seed=seed)


_LOADERS: dict[str, Callable[[str, int], dm_env.Environment]] = {
  'bsuite': _load_bsuite,
  'gym': _load_gym,
  'atari': _load_atari,
  'dm_control': _load_dm_control,
  'envpool': _load_envpool,
}
_SCHEMES = (*_LOADERS, *turn_factory.SCHEMES)


def _load_own(module_name: str, factory: str, seed: int) -> dm_env.Environment:
  """Calls `factory(seed=seed)` of a user's module."""
  name = f'{module_name}:{factory}'
  if not re.fullmatch(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)*', module_name):
    raise _unknown(name, module_name)
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as e:
    # Not an error inside the user's module, which keeps its traceback.
    if e.name and (module_name + '.').startswith(e.name + '.'):
      raise _unknown(name, module_name) from e
    raise
  function = getattr(module, factory, None)
  if not callable(function):
    raise errors.UserError(
      f'environment ({name!r}) must name a callable of the module {module_name}'
    )
  environment = function(seed=seed)
  if not isinstance(environment, dm_env.Environment):
    raise errors.UserError(
      f'environment ({name!r}) must return a dm_env.Environment; it returned '
      f'a {type(environment).__name__}'
    )
  return environment


def _unknown(name: str, scheme: str) -> errors.UserError:
  close = difflib.get_close_matches(scheme, ['catch', *_SCHEMES], n=1)
  hint = f' (did you mean {close[0]}?)' if close else ''
  return errors.UserError(
    f'environment ({name!r}) must be catch, '
    + ', '.join(f'{s}:<id>' for s in _SCHEMES)
    + f' or <importable module>:<factory>{hint}'
  )


def _unknown_id(what: str, name: str, known: Any) -> errors.UserError:
  known = list(known)
  close = difflib.get_close_matches(name, known, n=3) or known[:5]
  return errors.UserError(
    f'{what} ({name!r}) must be one of the {len(known)} there are, such as '
    + ', '.join(close)
  )


def _missing_extra(
  name: str, extra: str, cause: ImportError
) -> errors.MissingExtraError:
  return errors.MissingExtraError(
    f'environment ({name!r}) needs the extra {extra!r} ({cause}): '
    f"pip install 'tunix_reverb[{extra}]', or `make environments` in a "
    'checkout'
  )
