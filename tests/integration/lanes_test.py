"""What a role of one lane derives from a config, the other lane derives too."""

import json
import subprocess
import sys

import pytest

from tunix_reverb.agents import flat

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

# A user's own environment: nested observations of several dtypes, and an
# action that is a bounded vector.
_NESTED = """
import dm_env
from dm_env import specs
import numpy as np

class Nested(dm_env.Environment):
  def observation_spec(self):
    return {'image': specs.BoundedArray((4, 4, 3), np.uint8, 0, 255),
            'state': (specs.Array((3,), np.float64),
                      specs.Array((), np.int64))}

  def action_spec(self):
    return specs.BoundedArray((2,), np.float32, -1.0, [1.0, 2.0])

  def _observation(self):
    return {'image': np.zeros((4, 4, 3), np.uint8),
            'state': (np.zeros(3), np.int64(0))}

  def reset(self):
    return dm_env.restart(self._observation())

  def step(self, action):
    return dm_env.termination(1.0, self._observation())

def make(*, seed):
  return Nested()
"""

_DERIVE = """
import json, os, sys
sys.path.append(os.getcwd())
from tunix_reverb.agents import builder
from tunix_reverb.agents import flat
from tunix_reverb.replay import tables
for text in json.loads(sys.stdin.read()):
  config = flat.loads(text)
  description = tables.describe(
      builder.make_table_config(config),
      builder.make_agent(config).columns)
  print(json.dumps([flat.dumps(config), repr(description)]))
"""

_CONFIGS = [
  {},
  {'core': 'lstm', 'replay_mode': 'replay', 'sampler': 'prioritised'},
  {'environment': 'nested:make', 'core': 'gru', 'learning_rate': 1e-4},
]


def test_config_and_columns_are_the_same_in_both_lanes(
  server_python, subprocess_env, tmp_path
):
  if server_python == sys.executable:
    pytest.skip('there is one lane here; `make test-modern` has two')
  (tmp_path / 'nested.py').write_text(_NESTED)
  texts = json.dumps([flat.dumps(flat.from_flat(c)) for c in _CONFIGS])
  derived = [
    subprocess.run(
      [python, '-W', 'ignore', '-c', _DERIVE],
      input=texts,
      env=subprocess_env,
      cwd=tmp_path,
      text=True,
      capture_output=True,
      timeout=200,
    )
    for python in (sys.executable, server_python)
  ]
  for result in derived:
    assert result.returncode == 0, result.stderr
  here, there = (result.stdout.splitlines() for result in derived)
  assert len(here) == len(_CONFIGS)
  assert 'image' in here[-1]
  assert here == there
