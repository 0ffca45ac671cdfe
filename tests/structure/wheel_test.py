"""The wheel: what is in it, and that it works away from the checkout."""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import launch
import tunix_reverb

_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGES = ('tunix_reverb', 'launch')


def _pip(*arguments: str | pathlib.Path) -> None:
  result = subprocess.run(
    [sys.executable, '-m', 'pip', '--disable-pip-version-check', *arguments],
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> pathlib.Path:
  """A wheel built from a copy: a build leaves folders in its source tree."""
  source = tmp_path_factory.mktemp('source')
  for name in _PACKAGES:
    shutil.copytree(_ROOT / name, source / name)
  for name in ('setup.py', 'pyproject.toml', 'LICENSE', 'MANIFEST.in'):
    shutil.copy(_ROOT / name, source / name)
  _pip(
      'wheel', '--no-deps', '--no-index', '--no-build-isolation',
      '--wheel-dir', source / 'dist', source,
  )  # fmt: skip
  [built] = (source / 'dist').glob('*.whl')
  return built


def test_wheel_holds_every_module_and_nothing_else(wheel):
  expected = {
    path.relative_to(_ROOT).as_posix()
    for name in _PACKAGES
    for pattern in ('*.py', '*.binpb', '*.proto', 'py.typed')
    for path in (_ROOT / name).rglob(pattern)
  }
  assert 'tunix_reverb/replay/wire_client/protocol.binpb' in expected
  with zipfile.ZipFile(wheel) as archive:
    names = {n for n in archive.namelist() if '.dist-info/' not in n}
  assert names == expected


def test_wheel_says_what_it_needs(wheel):
  with zipfile.ZipFile(wheel) as archive:
    [path] = [n for n in archive.namelist() if n.endswith('/METADATA')]
    metadata = email.message_from_bytes(archive.read(path))
  assert metadata['Version'] == tunix_reverb.__version__
  assert metadata['Requires-Python'] == '>=3.11'
  assert metadata['License'] == 'Apache-2.0'
  assert set(metadata.get_all('Provides-Extra')) == {
      'agents', 'atari', 'bsuite', 'dev', 'dm-control', 'environments',
      'envpool', 'gym', 'modern', 'reverb', 'tpu-plan',
  }  # fmt: skip
  core = [n for n in metadata.get_all('Requires-Dist') if 'extra ==' not in n]
  assert not [n for n in core if n.startswith(('tensorflow', 'dm-reverb'))]


_IMPORT = """
import pathlib, sys
import launch.flags, tunix_reverb.core, tunix_reverb.specs
for module in (launch.flags, tunix_reverb.core, tunix_reverb.specs):
  assert pathlib.Path(sys.argv[1]) in pathlib.Path(module.__file__).parents
"""


def test_wheel_works_away_from_the_checkout(wheel, subprocess_env, tmp_path):
  site = tmp_path / 'site'
  _pip('install', '--no-deps', '--no-index', '--quiet', '--target', site, wheel)
  elsewhere = tmp_path / 'elsewhere'
  elsewhere.mkdir()
  env = subprocess_env | {'PYTHONPATH': str(site)}
  for command in (
    ['-c', _IMPORT, str(site)],
    ['-m', 'launch.local', '--help'],
  ):
    result = subprocess.run(
      [sys.executable, *command],
      env=env,
      cwd=elsewhere,
      capture_output=True,
      text=True,
      timeout=60,
    )
    assert result.returncode == 0, result.stderr
  assert '--environment' in result.stdout


@pytest.mark.skipif(
  'TUNIX_REVERB_TEST_WHEEL' not in os.environ,
  reason='only `make test` and `make test-modern` import the installed wheel',
)
def test_tests_import_the_installed_wheel():
  for package in (tunix_reverb, launch):
    path = pathlib.Path(package.__path__[0])
    assert path.parent.name == 'site-packages'
    for source in (_ROOT / package.__name__).rglob('*.py'):
      relative = source.relative_to(_ROOT / package.__name__)
      assert (path / relative).read_bytes() == source.read_bytes()
