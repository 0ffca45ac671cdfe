"""That the correction matters: old data, with it and without.

`benchmarks.correction` makes all its runs with three seeds; here the two that
say the most, with one.
"""

import json
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow  # A minute of CPU.
@pytest.mark.timeout(600)
def test_data_of_sixteen_updates_ago_teach_if_they_are_corrected():
  command = [sys.executable, '-m', 'benchmarks.correction', '--seeds=0']
  process = subprocess.run(
    [*command, '--runs=vtrace,uncorrected'],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=500,
  )
  assert process.returncode == 0, process.stderr
  checks = json.loads(process.stdout.splitlines()[-1])['checks']
  assert checks['vtrace_hits'] == {'value': 1, 'target': 1, 'ok': True}
  assert checks['uncorrected_hits'] == {'value': 0, 'target': 0, 'ok': True}
