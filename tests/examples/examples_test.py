"""The documented examples run, and do what they say."""

import importlib.util
import pathlib
import sys

import pytest

_EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'


def _load(name):
  """Imports an example from the checkout; it is not part of the wheel."""
  spec = importlib.util.spec_from_file_location(
    f'example_{name}', _EXAMPLES / f'{name}.py'
  )
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return module


@pytest.mark.replay
def test_a_plain_acme_loop_drives_our_actor_into_our_adder():
  items = _load('acme_loop').main(num_episodes=3)
  assert [i.lengths.tolist() for i in items] == [[9]] * 3
  assert [i.episode_id.tolist() for i in items] == [[0], [1], [2]]
  for item in items:
    assert item.observation.shape == (10, 10, 5)
    assert item.discount.tolist() == [1.0] * 8 + [0.0]
    assert abs(item.reward.sum()) == 1.0
    assert (item.behaviour_log_prob < 0).all()
    assert item.policy_version.tolist() == [1] * 9


@pytest.mark.standard_dtype_promotion
def test_our_learner_consumes_someone_elses_iterator():
  assert _load('own_iterator').main(num_learner_steps=150) > 0.9


def test_examples_are_what_the_readme_names():
  readme = (_EXAMPLES.parent / 'README.md').read_text()
  for path in _EXAMPLES.glob('[a-z]*.py'):
    assert f'examples.{path.stem}' in readme
