"""A whole run with admission, against a real server: nothing is lost or biased.

Actor loops run in threads of this process, so that what they generate can be
compared with what is learnt, trajectory by trajectory.
"""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys
import threading
import time

import dm_env
from dm_env import specs as dm_specs
import jax
import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.actor import test_utils
from tunix_reverb.agents.vtrace import builder
from tunix_reverb.agents.vtrace import flat
from tunix_reverb.agents.vtrace import session as session_lib
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.learner import publisher as publisher_lib
from tunix_reverb.replay import clients
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.telemetry import compiles
from tunix_reverb.telemetry import logger as logger_lib
from tunix_reverb.telemetry import milestones
from tunix_reverb.telemetry import reader
from tunix_reverb.telemetry import run_state
from tunix_reverb.telemetry import summary as summary_lib
from tunix_reverb.telemetry import watchdog

pytestmark = [
  pytest.mark.replay,
  pytest.mark.standard_dtype_promotion,
  pytest.mark.timeout(240),
]

_FAST_STEP_S = 0.004
_SLOW_EVERY = 100  # One episode of a hundred ...
_SLOW_FACTOR = 100  # ... takes a hundred times as long.
_FAST_LENGTHS, _SLOW_LENGTH = (1, 2, 3), 8


class _Episodes(dm_env.Environment):
  """Episodes of the lengths that `self.draw` says; observes two numbers."""

  def __init__(self, seed):
    self._rng = np.random.default_rng(seed)
    self._left = 0
    self._step_s = 0.0

  def draw(self):
    """(transitions, seconds for each) of the next episode."""
    return int(self._rng.integers(1, 12)), 0.0

  def reset(self):
    self._left, self._step_s = self.draw()
    return dm_env.restart(self._observation())

  def step(self, action):
    if self._step_s:
      time.sleep(self._step_s)
    self._left -= 1
    reward = float(self._rng.normal()) + float(action)
    if not self._left:
      return dm_env.termination(reward, self._observation())
    return dm_env.transition(reward, self._observation())

  def _observation(self):
    return self._rng.normal(size=2).astype(np.float32)

  def observation_spec(self):
    return dm_specs.Array((2,), np.float32)

  def action_spec(self):
    return dm_specs.DiscreteArray(3)


class _HeavyTailed(_Episodes):
  """99% fast episodes, 1% that are long and take a hundred times as long."""

  def draw(self):
    if self._rng.integers(_SLOW_EVERY):
      return int(self._rng.choice(_FAST_LENGTHS)), _FAST_STEP_S
    fast_s = _FAST_STEP_S * float(np.mean(_FAST_LENGTHS))
    return _SLOW_LENGTH, _SLOW_FACTOR * fast_s / _SLOW_LENGTH


def make_episodes(*, seed):
  """For `module:factory`."""
  return _Episodes(seed)


def make_heavy_tailed(*, seed):
  """For `module:factory`."""
  return _HeavyTailed(seed)


_FLAGS = {
  'replay_client': 'wire',
  'hidden_sizes': (4,),
  'core_size': 3,
  'trajectory_length': 8,
  'bucket_lengths': (9,),
  'batch_positions': 72,
  'packing_window': 1.0,
  'data_axis': 1,
  'learner_checkpoint_period_s': 0.0,
  'variable_update_period_s': 0.01,
  'item_bytes': 1,
}


class _RecordingWriter(core.ItemWriter):
  """Passes items on and keeps what it passed."""

  def __init__(self, writer):
    self._writer = writer
    self.items: list[types.Trajectories] = []

  def write(self, trajectories, timeout_s=None):
    written = self._writer.write(trajectories, timeout_s)
    if written:
      self.items.append(trajectories)
    return written

  def blocked_s(self):
    return self._writer.blocked_s()

  def close(self, timeout_s):
    return self._writer.close(timeout_s)


class _Actor:
  """An actor's loop in a thread."""

  def __init__(self, run, actor_id):
    config = run.config
    client = {'client': config.replay.replay_client}
    self.permits = builder.make_permit_source(config, run.address)
    self.writer = _RecordingWriter(
      clients.make_writer(
        run.address,
        columns=run.agent.columns,
        announce=self.permits is not None,
        **client,
      )
    )
    self._variables = clients.make_variable_source(
      run.address, period_s=0.01, **client
    )
    self._stop = threading.Event()
    self.loop, self.adder, self._environment = builder.make_actor_loop(
      config,
      run.agent,
      actor_id=actor_id,
      writer=self.writer,
      variables=self._variables,
      permits=self.permits,
      keep_waiting=lambda: not self._stop.is_set(),
    )
    self.error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def _run(self):
    try:
      while not self._stop.is_set() and not self.loop.wait_for_variables(0.2):
        pass
      self.loop.run(lambda: not self._stop.is_set())
    except BaseException as e:
      self.error = e

  def stop(self):
    if self._stop.is_set():
      return
    self._stop.set()
    self._thread.join(30.0)
    self._environment.close()
    assert self.writer.close(20.0) or not self.writer.items
    self.loop.close()
    self._variables.close()
    assert self.error is None, self.error


class _Run:
  """A server, its sweeper, a learner and actors.

  Attributes:
    learnt: `types.Segments` of every batch that the learner was given.
    batches: every batch it was given, if asked for.
  """

  def __init__(self, tmp_path, *, keep_batches=False, **flags):
    self.config = flat.from_flat(_FLAGS | flags)
    self.agent = builder.make_agent_spec(self.config)
    self.parts = builder.make_learner_parts(self.config, self.agent)
    self.server = clients.make_server(
      config=builder.make_table_config(self.config),
      columns=self.agent.columns,
      port=0,
      checkpoint_dir=None,
    )
    self.address = self.server.address
    self.sweeper = builder.make_sweeper(
      self.config, self.server, self.agent.columns
    )
    if self.sweeper is not None:
      self.sweeper.start()
    self.run_dir = tmp_path
    self.actors: list[_Actor] = []
    self.learnt: list[types.Segments] = []
    self.batches: list[types.Batch] = []
    self._keep_batches = keep_batches
    self._make_session()
    self.error: BaseException | None = None
    self._thread = threading.Thread(target=self._learn, daemon=True)

  def restart_learner(self):
    """Ends the learner, and starts another one as after a crash."""
    self.session.stop()
    self._thread.join(30.0)
    self.session.close()
    self._close_session()
    self.parts = builder.make_learner_parts(self.config, self.agent)
    self.learnt.clear()
    self._make_session()
    self._thread = threading.Thread(target=self._learn, daemon=True)
    self._thread.start()

  def _make_session(self):
    client = {'client': self.config.replay.replay_client}
    columns = self.agent.columns
    self._sampler = clients.make_sampler(
      [self.address], columns=columns, **client
    )
    self._sink = clients.make_variable_sink(self.address, **client)
    self._publisher = publisher_lib.Publisher(self._sink)
    self._table = builder.make_permit_table(self.config, [self.address])
    self.watchdog = watchdog.Watchdog(100.0, role='learner')
    self.logger = logger_lib.MetricLogger(self.run_dir, 'learner')
    self.session = session_lib.LearnerSession(
      self.config,
      self.agent,
      self.parts,
      sampler=self._sampler,
      publisher=self._publisher,
      logger=self.logger,
      watchdog=self.watchdog,
      milestones=milestones.Milestones(None, 'learner'),
      compile_counter=compiles.CompileCounter(),
      run_dir=None,
      served_version=clients.served_version(
        self.address, threading.Event(), **client
      ),
      permit_table=self._table,
    )
    learner = self.session.learner
    learner._batches = self._record(learner._batches)

  def _record(self, batches):
    for packed in batches:
      if packed is not None:
        self.learnt.append(packed.segments)
        if self._keep_batches:
          self.batches.append(jax.tree_util.tree_map(np.array, packed.batch))
      yield packed

  def start(self, num_actors=1):
    self._thread.start()
    self.actors += [_Actor(self, i) for i in range(num_actors)]

  def _learn(self):
    try:
      self.session.run()
    except BaseException as e:
      self.error = e

  def wait(self, condition, timeout_s=120.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
      assert self.error is None, self.error
      assert time.monotonic() < deadline_s, self.watchdog.describe_waits()
      time.sleep(0.01)

  def wait_for_end(self):
    self._thread.join(180.0)
    assert not self._thread.is_alive() and self.error is None, self.error

  def stop(self):
    """Stops the actors, then the learner."""
    for actor in self.actors:
      actor.stop()
    self.session.stop()
    self._thread.join(30.0)
    self.session.close()

  def close(self):
    self.stop()
    self._close_session()
    if self.sweeper is not None:
      self.sweeper.close()
    self.server.stop(20.0)

  def _close_session(self):
    self.logger.close()
    self._publisher.close(5.0)
    self._sink.close()
    self._sampler.close()
    if self._table is not None:
      self._table.close()

  @property
  def drops(self):
    return self.session._drops

  def generated(self):
    """Length of every trajectory written, by its permit."""
    return {
      int(item.permit_id[0]): int(item.lengths[0])
      for actor in self.actors
      for item in actor.writer.items
    }

  def learnt_lengths(self):
    """Length of every trajectory learnt, by its permit."""
    found = [
      (int(permit_id), int(length))
      for segments in self.learnt
      for permit_id, length in zip(segments.permit_id, segments.length)
    ]
    assert len(found) == len(dict(found)), 'learnt twice'
    return dict(found)

  def summary(self):
    state = run_state.RunState()
    state.update(reader.Reader(self.run_dir).poll())
    return summary_lib.make(
      state, reason='stopped', solved=None, wall_s=1.0, restarts={}
    )


@pytest.fixture
def make(tmp_path):
  """Makes runs; closes them after the test."""
  jax.config.update('jax_numpy_dtype_promotion', 'standard')
  runs = []

  def _make(**flags):
    runs.append(_Run(tmp_path, **flags))
    return runs[-1]

  yield _make
  for run in runs:
    run.close()


_HEAVY = {
  'environment': f'{__name__}:make_heavy_tailed',
  'environment_mode': 'asynchronous',
  'environments_per_actor': 8,
  'max_policy_lag': 2,
}


def test_with_admission_a_heavy_tail_is_learnt_whole(make):
  run = make(admission=True, trajectories_per_update=8, **_HEAVY)
  run.start(num_actors=2)
  # Until some of the slow ones were learnt: at least four are expected among
  # this many, but for one in a hundred.
  slow = lambda: [n for n in run.generated().values() if n == _SLOW_LENGTH]
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
  assert collections.Counter(learnt.values())[_SLOW_LENGTH] >= 2
  assert run.session._admission.metrics()['admission_hold_s_total'] > 0
  assert 'dropped by length' not in summary_lib.as_text(run.summary())


def test_without_admission_the_summary_shows_the_bias(make):
  # Batches and a table so small that what is fast is learnt at once.
  small = {'batch_positions': 18, 'max_table_items': 2, 'max_policy_lag': 10}
  run = make(**(_HEAVY | small))
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
  'environment': f'{__name__}:make_episodes',
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
  loop, _, environment = builder.make_actor_loop(
    config,
    run.agent,
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


_HOLDER = """
import sys, time
from tunix_reverb.replay import permits
source = permits.WirePermitSource(sys.argv[1])
source.request(int(sys.argv[2]))
taken = 0
while taken < int(sys.argv[2]):
  taken += len(source.take(1.0))
print('taken', flush=True)
time.sleep(1000)
"""


def test_a_killed_actors_permits_are_given_to_others(
  make, subprocess_env, tmp_path
):
  run = make(admission=True, permit_lease_s=10.0, **_SYNCHRONOUS)
  run._thread.start()
  # It holds all but one, and no update can be made without them.
  process = subprocess.Popen(
    [sys.executable, '-c', _HOLDER, run.address, str(_K - 1)],
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
  run.actors.append(_Actor(run, 0))
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
  # What was begun under the old permits is too old for the new version.
  assert min(run.learnt_lengths()) > before
  assert run.session.learner.learner_step >= 5
