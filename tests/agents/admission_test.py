"""A whole run with admission, against a real server: nothing lost or biased."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys
import time

import admission_rig as rig
import jax
import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.actor import test_utils
from tunix_reverb.agents import builder
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.telemetry import summary as summary_lib

pytestmark = [
  pytest.mark.slow,
  pytest.mark.replay,
  pytest.mark.standard_dtype_promotion,
  pytest.mark.timeout(240),
]


@pytest.fixture
def make(tmp_path):
  """Makes runs; closes them after the test."""
  jax.config.update('jax_numpy_dtype_promotion', 'standard')
  runs = []

  def _make(**flags):
    runs.append(rig.Run(tmp_path, **flags))
    return runs[-1]

  yield _make
  for run in runs:
    run.close()


_HEAVY = {
  'environment': 'admission_rig:make_heavy_tailed',
  'environment_mode': 'asynchronous',
  'environments_per_actor': 8,
  'max_policy_lag': 2,
}


def test_with_admission_a_heavy_tail_is_learnt_whole(make):
  run = make(admission=True, trajectories_per_update=8, **_HEAVY)
  run.start(num_actors=2)
  # Until some of the slow ones were learnt: at least four are expected among
  # this many, but for one in a hundred.
  slow = lambda: [n for n in run.generated().values() if n == rig.SLOW_LENGTH]
  run.wait(lambda: len(run.generated()) >= 600 and len(slow()) >= 3)
  run.stop()
  generated, learnt = run.generated(), run.learnt_lengths()
  dropped = run.drops.by_cause()
  assert dropped['lag'] == dropped['age'] == dropped['poison'] == 0
  left = {i: generated[i] for i in generated.keys() - learnt.keys()}
  assert learnt.keys() <= generated.keys()
  # What is left was still under way: at most as many as there are permits.
  assert len(left) <= 3 * 8
  assert dropped['shutdown'] <= len(left)
  counts = collections.Counter(generated.values())
  counts.subtract(left.values())
  assert +counts == collections.Counter(learnt.values())
  assert collections.Counter(learnt.values())[rig.SLOW_LENGTH] >= 2
  assert run.session._admission.metrics()['admission_hold_s_total'] > 0
  assert 'dropped by length' not in summary_lib.as_text(run.summary())


def test_without_admission_the_summary_shows_the_bias(make):
  # Batches and a table so small that what is fast is learnt at once.
  flags = {
    'environment': 'admission_rig:make_overtaken',
    'batch_positions': 18,
    'max_table_items': 2,
    'max_policy_lag': 30,
  }
  run = make(**(_HEAVY | flags))
  run.start(num_actors=2)
  run.wait(
    lambda: run.drops.by_decile()[9] >= 5 and run.drops.seen_total >= 600
  )
  time.sleep(1.1)  # A report later.
  run.stop()
  summary = run.summary()
  # One trajectory of a hundred is that long, and most that are lost.
  deciles = summary['dropped_by_length_decile']
  assert deciles[9] > 0.5 * sum(deciles), deciles
  assert 'long trajectories are lost more often' in summary_lib.as_text(summary)


_K = 4  # Trajectories of an update.
_SYNCHRONOUS = {
  'environment': 'admission_rig:make_episodes',
  'environments_per_actor': 3,
  'core': 'gru',
  'max_policy_lag': 0,
  'trajectories_per_update': _K,
  'max_learner_steps': 6,
}


@pytest.mark.parametrize('mode', ['vectorised', 'asynchronous'])
def test_no_lag_reproduces_a_synchronous_run_bit_for_bit(make, mode):
  run = make(
    admission=True, keep_batches=True, environment_mode=mode, **_SYNCHRONOUS
  )
  run.start()
  run.wait_for_end()
  batches, states = _synchronous_run(run)
  ours = jax.device_get(run.session.learner.state)
  assert len(run.batches) == len(batches) == 6
  for got, expected in zip(run.batches, batches):
    jax.tree_util.tree_map(np.testing.assert_array_equal, got, expected)
  jax.tree_util.tree_map(np.testing.assert_array_equal, ours, states[-1])
  moved = jax.tree_util.tree_leaves(
    jax.tree_util.tree_map(
      lambda a, b: bool((a != b).any()), states[0].params, states[-1].params
    )
  )
  assert any(moved), 'nothing was learnt'


def _synchronous_run(run):
  """Generate K trajectories, pack, update: (batches, states before and after).

  Over the same parts, without a server, a thread or a permit: environments
  take turns, and each plays its trajectory to the end.
  """
  config = dataclasses.replace(
    run.config,
    actor=dataclasses.replace(run.config.actor, environment_mode='vectorised'),
  )
  writer = test_utils.ListWriter()
  permits = _EndlessPermits()
  loop, _, environment = run.agent.make_acting(
    config,
    actor_id=0,
    writer=writer,
    variables=_NoVariables(),
    permits=permits,
  )
  parts = builder.make_learner_parts(config, run.agent)
  packer = packer_lib.Packer(
    buckets=parts.buckets, columns=run.agent.columns, window=1.0
  )
  state, states, batches = parts.state, [], []
  for version in range(1, 7):
    states.append(jax.device_get(state))
    loop._policy.set_variables(types.Variables(version, states[-1].params))
    for _ in range(_K):
      _play_one(loop, permits, writer, version)
    for item in writer.items[-_K:]:
      packer.add(item)
    packed = packer.pop(flush=True)
    assert packed.segments.length.size == _K
    batches.append(jax.tree_util.tree_map(np.array, packed.batch))
    # The compiled update of the run itself.
    state, _ = run.parts.updates[packed.bucket](
      state, mesh_lib.place_batch(packed.batch, parts.mesh)
    )
  environment.close()
  return batches, [*states, jax.device_get(state)]


class _EndlessPermits(core.PermitSource):
  """Gives one permit when told to."""

  def __init__(self):
    self.asked = 0
    self._come = []
    self._next = 1

  def request(self, count):
    self.asked += count

  def give(self, version):
    assert self.asked
    self.asked -= 1
    self._come.append(types.Permit(self._next, version))
    self._next += 1

  def take(self, timeout_s):
    come, self._come = self._come, []
    return come

  def close(self, held=()):
    pass


class _NoVariables(core.VariableSource):
  def get_variables(self, min_version=0, timeout_s=0.0):
    return None


def _play_one(loop, permits, writer, version):
  """Plays whosever turn it is until a trajectory has ended."""
  written = len(writer.items)
  while not permits.asked:
    loop.step(0.0)
  permits.give(version)
  while len(writer.items) == written:
    loop.step(0.0)


def test_a_killed_actors_permits_are_given_to_others(
  make, subprocess_env, tmp_path
):
  run = make(admission=True, permit_lease_s=10.0, **_SYNCHRONOUS)
  run.start(num_actors=0)
  # It holds all but one, and no update can be made without them.
  process = subprocess.Popen(
    [sys.executable, '-c', rig.HOLDER, run.address, str(_K - 1)],
    env=subprocess_env,
    cwd=tmp_path,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stdout.readline() == 'taken\n'
    begin_s = time.monotonic()
  finally:
    process.kill()
    process.wait(20.0)
    process.stdout.close()
  run.actors.append(rig.Actor(run, 0))
  run.wait_for_end()
  assert time.monotonic() - begin_s > 8.0, 'it did not wait for the lease'
  metrics = run.session._admission.metrics()
  assert metrics['permits_reissued_total'] == _K - 1
  assert run.session.learner.learner_step == 6
  versions = [s.policy_version.tolist() for s in run.learnt]
  assert versions == [[v] * _K for v in range(1, 7)]


def test_a_restarted_learner_gives_permits_of_its_own(make):
  run = make(admission=True, **(_SYNCHRONOUS | {'max_learner_steps': 10_000}))
  run.start()
  run.wait(lambda: len(run.learnt) >= 5)
  before = max(run.learnt_lengths())
  run.restart_learner()
  run.wait(lambda: len(run.learnt) >= 5)
  run.stop()
  learnt = [permit_id >> 32 for permit_id in run.learnt_lengths()]
  assert max(learnt) > before >> 32, 'a number for each learner'
  # Of the old permits, only those are of use that begin with its variables.
  assert sum(i != max(learnt) for i in learnt) <= _K
  assert run.session.learner.learner_step >= 5
