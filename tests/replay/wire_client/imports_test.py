"""The wire client runs where neither Reverb nor TensorFlow is installed."""

import pkgutil
import subprocess
import sys

import pytest

from tunix_reverb.replay import wire_client

_MODULES = sorted(
  module.name
  for module in pkgutil.iter_modules(
    wire_client.__path__, f'{wire_client.__name__}.'
  )
)

_IMPORT = """
import importlib, sys
for name in ('reverb', 'tensorflow'):
  sys.modules[name] = None  # An import of it raises ImportError.
importlib.import_module(sys.argv[1])
loaded = {name.partition('.')[0] for name in sys.modules if sys.modules[name]}
sys.exit(', '.join(loaded & {'reverb', 'tensorflow', 'jax'}) or 0)
"""


@pytest.mark.parametrize('module', _MODULES)
def test_a_module_needs_neither_reverb_nor_tensorflow(
  module, subprocess_env, tmp_path
):
  result = subprocess.run(
    [sys.executable, '-P', '-c', _IMPORT, module],
    env=subprocess_env,
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert result.returncode == 0, result.stderr
