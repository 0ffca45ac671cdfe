"""Groups of episodes against a real server: none is lost, nothing locks up."""

from __future__ import annotations

import subprocess
import sys

import admission_rig as rig
import jax
import numpy as np
import pytest

from tunix_reverb.environments.tools import task

pytestmark = [
  pytest.mark.slow,  # Compiles the engines of two actors and a learner.
  pytest.mark.replay,
  pytest.mark.standard_dtype_promotion,
  pytest.mark.timeout(240),
]

_SIZE = 4
_GROUPS = 4  # Of one update.
_LAG = 1
_UPDATES = 12
_FLAGS = {
  'agent': 'transformer',
  'environment': 'tool:groups_test:Flaky',
  'environment_mode': 'asynchronous',
  'environments_per_actor': 2 * _SIZE,
  'loss': 'tis',
  'group_size': _SIZE,
  'advantage': 'rloo',
  'trajectory_length': 15,
  'bucket_lengths': (16,),
  'batch_positions': 16 * _SIZE * _GROUPS,
  'admission': True,
  'trajectories_per_update': _SIZE * _GROUPS,
  'max_policy_lag': _LAG,
  'max_learner_steps': _UPDATES,
}


class Flaky(task.Task):
  """For `tool:module:class`: an episode of eight fails."""

  character_limits = task.Limits(
    max_turns=1, max_turn_tokens=4, max_observation_tokens=4, max_tokens=12
  )

  def start(self, generator):
    number = int(generator.integers(8))

    def score(episode):
      if np.random.default_rng(episode.turns[-1].tokens).random() < 1 / 8:
        raise RuntimeError('the judge broke')
      return float(episode.answer.startswith(str(number)))

    return task.Instance(
      messages=[{'role': 'user', 'content': str(number)}], score=score
    )


@pytest.fixture
def run(tmp_path):
  jax.config.update('jax_numpy_dtype_promotion', 'standard')
  made = rig.Run(tmp_path, permit_lease_s=8.0, **_FLAGS)
  yield made
  made.close()


def test_with_failing_environments_and_a_killed_actor(
  run, subprocess_env, tmp_path
):
  run.start(num_actors=0)
  # An actor that takes permits of two groups and is killed.
  with subprocess.Popen(
    [sys.executable, '-c', rig.HOLDER, run.address, '2'],
    env=subprocess_env,
    cwd=tmp_path,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout.readline() == 'taken\n'
    process.kill()
  run.actors += [rig.Actor(run, i) for i in range(2)]
  run.wait_for_end()
  assert run.session._admission.metrics()['permits_reissued_total'] == 2
  items = [item for actor in run.actors for item in actor.writer.items]
  sizes = {item.lengths.size for item in items}
  assert max(sizes) == _SIZE and 2 <= min(sizes) < _SIZE
  failures = [a._environment.failures['error'] for a in run.actors]
  assert sum(failures) > 3
  # Every group under a permit of its own, and learnt in whole groups.
  permits = [int(item.permit_id[0]) for item in items]
  assert len(set(permits)) == len(permits)
  assert all((item.permit_id[1:] == 0).all() for item in items)
  of_permit = dict(zip(permits, (item.lengths.size for item in items)))
  assert len(run.learnt) == _UPDATES
  for version, segments in enumerate(run.learnt, 1):
    learnt = segments.permit_id[segments.permit_id > 0].tolist()
    assert len(learnt) >= _GROUPS
    assert sum(of_permit[i] for i in learnt) == segments.length.size
    assert (version - segments.policy_version <= _LAG).all()
  assert not {
    cause: count
    for cause, count in run.drops.by_cause().items()
    if count and cause != 'shutdown'
  }


def test_a_restarted_learner_goes_on_with_groups(run):
  run.start(num_actors=2)
  run.wait(lambda: len(run.learnt) >= 4)
  run.restart_learner()
  run.wait(lambda: len(run.learnt) >= 4)
  run.wait(lambda: run.session.learner.learner_step >= 4)
