"""Evaluations of turns: as many episodes as asked for, of one version."""

import threading

import numpy as np
import pytest
import turn_rig

from tunix_reverb.actor import evaluation
from tunix_reverb.actor import turn_evaluation
from tunix_reverb.actor import turn_loop
from tunix_reverb.environments import factory
from tunix_reverb.environments import turn_factory
from tunix_reverb.environments import vector
from tunix_reverb.telemetry import metrics

_NUM = 3


@pytest.fixture(scope='module')
def engine():
  """Compiled once."""
  return turn_rig.make_engine(_NUM)


@pytest.fixture
def make(engine):
  """Makes evaluators; closes them."""
  made = []

  def _make(environment, num_episodes, transcripts=None):
    for slot in range(_NUM):
      engine.cancel(slot)
    evaluator = turn_evaluation.TurnEvaluator(
      environment,
      engine,
      transcripts or turn_evaluation.Transcripts(),
      num_episodes=num_episodes,
      config=turn_loop.TurnConfig(
        max_turn_tokens=turn_rig.MAX_TURN,
        token_dtype=np.dtype(np.int32),
        seed=1,
      ),
    )
    evaluator.set_variables(turn_rig.Variables().get_variables())
    made.append(evaluator)
    return evaluator

  yield _make
  for evaluator in made:
    evaluator.close()


def _scripted(**kwargs):
  return [lambda i=i: turn_rig.Environment(i, **kwargs) for i in range(_NUM)]


def test_every_evaluation_plays_its_episodes_to_the_end(make):
  environment = vector.SynchronousVectorEnvironment(_scripted())
  evaluator = make(environment, 9)
  for _ in range(3):
    result = evaluator.evaluate()
    # Turn t earns t + 1: 1, 3 or 6 for 1, 2 or 3 turns.
    assert result.returns.size == result.lengths.size == 9
    np.testing.assert_array_equal(
      result.returns, result.lengths * (result.lengths + 1) / 2
    )
    assert result.policy_version == 1 and result.successes is None
    metrics.check_names(result.metrics())
  # Nothing is left under way for the next version to end.
  assert not evaluator._engine.has_work


def test_slow_episodes_are_not_left_out(make):
  """The third environment waits until the others have played a few."""
  played = threading.Semaphore(0)

  def before_step(environment):
    if environment.number < 2:
      played.release()
    else:
      assert played.acquire(timeout=20.0)

  environment = vector.AsynchronousVectorEnvironment(
    _scripted(before_step=before_step), timeout_s=30.0
  )
  result = make(environment, 7).evaluate()
  assert result.returns.size == 7


def test_giving_up_gives_none(make):
  environment = vector.SynchronousVectorEnvironment(_scripted())
  asked = iter([True, True, False])
  evaluator = make(environment, 50)
  assert evaluator.evaluate(keep_going=lambda: next(asked)) is None


def test_tasks_tell_their_success_and_their_transcripts(make):
  transcripts = turn_evaluation.Transcripts()
  environment = factory.make_vector(
    'tool:reverse/3',
    num_environments=_NUM,
    seed=5,
    turn_options=turn_factory.TurnOptions(on_episode=transcripts.add),
  )
  progress = []
  result = make(environment, 6, transcripts).evaluate(
    on_progress=lambda: progress.append(1)
  )
  assert len(result.transcripts) == 6 and progress
  scores = [transcript['score'] for transcript in result.transcripts]
  assert result.successes == sum(score == 1 for score in scores)
  np.testing.assert_allclose(sorted(scores), sorted(result.returns))
  values = result.metrics()
  metrics.check_names(values)
  assert values['evaluation_success_rate'] == result.successes / 6
  assert f'success {result.successes} of 6' in result.describe()


@pytest.mark.parametrize(
  ('successes', 'trials', 'low', 'high'),
  # Of the published tables.
  [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (95, 100, 0.8882, 0.9785)],
)
def test_confidence_interval(successes, trials, low, high):
  ours = evaluation.wilson_interval(successes, trials)
  np.testing.assert_allclose(ours, (low, high), atol=1e-4)
