"""Every flag of every binary says what it is, with its unit."""

import json
import pathlib
import subprocess
import sys

import pytest

import launch

_BINARIES = sorted(
  path.stem
  for path in pathlib.Path(launch.__path__[0]).glob('*.py')
  if '__main__' in path.read_text(encoding='utf-8')
)

_LIST_FLAGS = """
import importlib, json, sys
from launch import flags
module = importlib.import_module(sys.argv[1])
# A role defines these when it runs; a tool has an --environment of its own.
if hasattr(module, 'plan_flags'):
  module.plan_flags.define()
elif 'environment' not in flags.FLAGS:
  flags.define_config_flags()
  flags.define_role_flags()
print(json.dumps({
    flag.name: flag.help
    for module, defined in flags.FLAGS.flags_by_module_dict().items()
    if module.startswith('launch') or module == sys.argv[1]
    for flag in defined
}))
"""

# The end of a flag's name -> the word its help must hold.
_UNITS = {'_s': 'second', '_bytes': 'byte', '_ms': 'millisecond'}


@pytest.mark.parametrize('module', ['flags', *_BINARIES])
def test_every_flag_has_help_with_its_unit(module, subprocess_env, tmp_path):
  result = subprocess.run(
    [sys.executable, '-P', '-c', _LIST_FLAGS, f'launch.{module}'],
    env=subprocess_env,
    cwd=tmp_path,
    text=True,
    capture_output=True,
    timeout=60,
  )
  assert result.returncode == 0, result.stderr
  helps = json.loads(result.stdout)
  assert {'environment', 'topology'} & set(helps)
  assert not [name for name, text in helps.items() if len(text or '') < 12]
  assert not [
    f'--{name} must name its unit, {unit}: {text}'
    for name, text in helps.items()
    for suffix, unit in _UNITS.items()
    if name.endswith(suffix) and unit not in text.lower()
  ]
