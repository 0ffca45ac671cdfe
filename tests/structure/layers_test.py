"""The layers of the package, in the source and in a running process."""

import pathlib
import pkgutil
import shutil
import subprocess
import sys

import pytest

import launch
import tunix_reverb

_ROOT = pathlib.Path(__file__).parents[2]
_REVERB_CLIENT = 'tunix_reverb.replay.reverb_client'


def _modules() -> list[str]:
  names = []
  for package in (tunix_reverb, launch):
    names.append(package.__name__)
    names += [
      module.name
      for module in pkgutil.walk_packages(
        package.__path__, f'{package.__name__}.', onerror=lambda _: None
      )
    ]
  return names


def _run(code: str, *arguments: str, env: dict[str, str], cwd: pathlib.Path):
  return subprocess.run(
    [sys.executable, '-P', '-c', code, *arguments],
    env=env,
    cwd=cwd,
    text=True,
    capture_output=True,
    timeout=100,
  )


def _lint_imports(root: pathlib.Path, env: dict[str, str]):
  """Checks the contracts of `root`'s pyproject.toml on the source there."""
  return subprocess.run(
    [pathlib.Path(sys.executable).parent / 'lint-imports', '--no-cache'],
    env=env | {'PYTHONPATH': str(root)},
    cwd=root,
    text=True,
    capture_output=True,
    timeout=100,
  )


def test_import_contracts_hold(subprocess_env):
  result = _lint_imports(_ROOT, subprocess_env)
  assert result.returncode == 0, result.stdout + result.stderr


_IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
  importlib.import_module(name)
print(*sorted({name.partition('.')[0] for name in sys.modules}))
"""


def test_nothing_outside_reverb_client_loads_reverb_or_tensorflow(
  subprocess_env, tmp_path
):
  modules = [m for m in _modules() if not m.startswith(_REVERB_CLIENT)]
  assert len(modules) > 10

  result = _run(_IMPORT_ALL, *modules, env=subprocess_env, cwd=tmp_path)

  assert result.returncode == 0, result.stderr
  loaded = set(result.stdout.split())
  assert 'jax' in loaded
  assert not loaded & {'reverb', 'tensorflow', 'keras'}


_LIGHT = [
  'tunix_reverb',
  'tunix_reverb.errors',
  'tunix_reverb.agents.config',
  'launch.flags',
  'launch.app',
  'launch.plan',
]


@pytest.mark.parametrize('module', _LIGHT)
def test_what_flags_need_loads_no_jax(module, subprocess_env, tmp_path):
  result = _run(_IMPORT_ALL, module, env=subprocess_env, cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  heavy = {'jax', 'flax', 'optax', 'orbax', 'reverb', 'tensorflow'}
  assert not set(result.stdout.split()) & heavy


def test_a_planted_import_is_caught(subprocess_env, tmp_path):
  """The contracts can fail: a copy with one forbidden import breaks them."""
  for name in ('tunix_reverb', 'launch'):
    shutil.copytree(_ROOT / name, tmp_path / name)
  shutil.copy(_ROOT / 'pyproject.toml', tmp_path)
  types = tmp_path / 'tunix_reverb' / 'types.py'
  types.write_text(types.read_text() + '\nfrom tunix_reverb import agents\n')
  core = tmp_path / 'tunix_reverb' / 'core.py'
  core.write_text(core.read_text() + '\ndef f():\n  import reverb\n')
  result = _lint_imports(tmp_path, subprocess_env)
  assert result.returncode == 1, result.stdout + result.stderr
  assert 'tunix_reverb.types -> tunix_reverb.agents' in result.stdout
  assert 'tunix_reverb.core -> reverb' in result.stdout
