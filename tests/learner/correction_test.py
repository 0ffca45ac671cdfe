"""That the correction matters: old data, with it and without.

Through the harness of `benchmarks.correction`, which makes all its runs with
three seeds; here the two that say the most, with one.
"""

import functools
import importlib.util
import pathlib
import sys

import pytest

_FILE = pathlib.Path(__file__).parents[2] / 'benchmarks' / 'lagged_reversal.py'


@functools.cache
def _harness():
  """Loaded by its file: the wheel that is tested has no benchmarks."""
  spec = importlib.util.spec_from_file_location('lagged_reversal', _FILE)
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look their module up.
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return module


@pytest.mark.slow  # Half a minute of CPU each.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  ('name', 'learns'), [('tis', True), ('uncorrected', False)]
)
def test_data_of_sixteen_updates_ago_teach_if_they_are_corrected(name, learns):
  spec, is_to_hit = _harness().runs()[name]
  assert (spec.lag, is_to_hit) == (16, learns)
  result = _harness().run(spec, lambda *_: None)
  assert (result.hit is not None) == learns, result.last
