"""Budgets and rules that a reader of the source relies on."""

import ast
import functools
import pathlib
import subprocess

import pytest

_ROOT = pathlib.Path(__file__).parents[2]

_MAX_MODULE_LINES = 500
_MAX_FUNCTION_LINES = 80
_MAX_INIT_LINES = 40
_MAX_BINARY_LINES = 120

_LIBRARY = sorted((_ROOT / 'tunix_reverb').rglob('*.py'))
_LAUNCH = sorted((_ROOT / 'launch').rglob('*.py'))
_BENCHMARKS = sorted((_ROOT / 'benchmarks').rglob('*.py'))
_CODE = _LIBRARY + _LAUNCH + _BENCHMARKS


def _name(path: pathlib.Path) -> str:
  return path.relative_to(_ROOT).as_posix()


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding='utf-8'), filename=str(path))


def _num_lines(path: pathlib.Path) -> int:
  return len(path.read_text(encoding='utf-8').splitlines())


def _functions(path: pathlib.Path):
  for node in ast.walk(_tree(path)):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      yield node


def _num_function_lines(function) -> tuple[int, int]:
  """Returns its lines and its budget; the docstring of an init is free."""
  length = function.end_lineno - function.lineno + 1
  if function.name != '__init__':
    return length, _MAX_FUNCTION_LINES
  first = function.body[0]
  if ast.get_docstring(function) is not None:
    length -= first.end_lineno - first.lineno + 1
  return length, _MAX_INIT_LINES


@pytest.mark.parametrize('path', _CODE, ids=_name)
def test_module_and_functions_fit_their_budgets(path):
  too_long = []
  if _num_lines(path) > _MAX_MODULE_LINES:
    too_long.append(f'module: {_num_lines(path)} > {_MAX_MODULE_LINES} lines')
  for function in _functions(path):
    length, budget = _num_function_lines(function)
    if length > budget:
      too_long.append(
        f'{function.name} (line {function.lineno}): {length} > {budget} lines'
      )
  assert not too_long


def _is_binary(path: pathlib.Path) -> bool:
  return any(
    isinstance(node, ast.If) and '__main__' in ast.unparse(node.test)
    for node in _tree(path).body
  )


def test_binaries_stay_thin():
  lines = {_name(p): _num_lines(p) for p in _LAUNCH if _is_binary(p)}
  assert not {n: k for n, k in lines.items() if k > _MAX_BINARY_LINES}


@pytest.mark.parametrize('path', _LIBRARY + _LAUNCH, ids=_name)
def test_packages_init_holds_only_a_docstring(path):
  if path.name != '__init__.py':
    assert ast.get_docstring(_tree(path)), 'a module must say what it is'
    return
  rest = [ast.unparse(node) for node in _tree(path).body[1:]]
  assert ast.get_docstring(_tree(path))
  assert all(line.startswith('__version__') for line in rest)


def _uses(tree: ast.Module) -> set[str]:
  """Returns the dotted names of what `tree` imports and reads."""
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
    elif isinstance(node, ast.Attribute):
      found.add(ast.unparse(node))
  return found


# What reaches outside the process, or changes all of it, is set by binaries.
_BINARIES_ONLY = (
  'absl.app',
  'absl.flags',
  'jax.config',
  'os.environ',
  'os.getenv',
  'os.putenv',
  'signal.signal',
  'sys.argv',
)


def _binaries_only(tree: ast.Module) -> set[str]:
  return {
    used
    for used in _uses(tree)
    for name in _BINARIES_ONLY
    if used == name or used.startswith(name + '.')
  }


@pytest.mark.parametrize('path', _LIBRARY, ids=_name)
def test_library_leaves_flags_and_environment_to_the_binaries(path):
  assert not _binaries_only(_tree(path))


@pytest.mark.parametrize(
  'code',
  [
    'import os\nos.environ["A"] = "1"',
    'from os import environ',
    'from absl import flags',
    'import absl.flags',
    'import jax\njax.config.update("jax_enable_x64", True)',
    'from jax import config',
  ],
)
def test_a_planted_use_is_caught(code):
  assert _binaries_only(ast.parse(code))


@pytest.mark.parametrize('path', _LIBRARY + _LAUNCH, ids=_name)
def test_nothing_depends_on_finalisers(path):
  assert not [f.lineno for f in _functions(path) if f.name == '__del__']


def _tracked_files() -> list[pathlib.Path]:
  listing = subprocess.run(
    ['git', 'ls-files', '-z'],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=30,
  )
  if listing.returncode != 0:
    pytest.skip('not a git checkout: no list of tracked files')
  names = listing.stdout.split('\0')
  return [_ROOT / n for n in names if n and (_ROOT / n).is_file()]


def test_no_tracked_file_names_a_machine():
  # In two parts each, so that this file does not hold them.
  needles = [a + b for a, b in (('/wo', 'rk/'), ('/ro', 'ot/'), ('/opt', '/'))]
  found = {}
  for path in _tracked_files():
    text = path.read_text(encoding='utf-8', errors='replace')
    hits = [needle for needle in needles if needle in text]
    if hits:
      found[_name(path)] = hits
  assert not found


def test_locks_hold_versions_and_hashes_only():
  locks = sorted((_ROOT / 'requirements').glob('*.txt'))
  assert [lock.stem for lock in locks] == [
    'dev',
    'environments',
    'modern-dev',
    'modern',
    'runtime',
    'smollm2',
  ]
  for lock in locks:
    text = lock.read_text()
    assert '://' not in text and '--index' not in text
    for line in text.splitlines():
      assert line.startswith((' ', '#')) or '==' in line, line


def _pins(name: str) -> set[str]:
  text = (_ROOT / 'requirements' / f'{name}.txt').read_text()
  return {
    line.removesuffix(' \\')
    for line in text.splitlines()
    if line and not line.startswith((' ', '#'))
  }


def test_each_lock_holds_the_one_before():
  assert _pins('runtime') < _pins('environments') < _pins('dev')
  assert _pins('modern') < _pins('modern-dev')


def test_the_modern_lane_is_held_back_by_nothing_of_the_other():
  names = {pin.partition('==')[0] for pin in _pins('modern-dev')}
  assert not names & {'dm-reverb', 'tensorflow', 'tensorflow-cpu'}
  versions = dict(pin.split('==') for pin in _pins('modern'))
  assert int(versions['numpy'].partition('.')[0]) >= 2
  assert tuple(map(int, versions['jax'].split('.')[:2])) >= (0, 10)
