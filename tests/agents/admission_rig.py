"""A whole run with admission in this process, for its tests.

Actor loops run in threads, so that what they generate can be compared with what
is learnt, trajectory by trajectory.
"""

from __future__ import annotations

import threading
import time

import dm_env
from dm_env import specs as dm_specs
import jax
import numpy as np

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.agents import builder
from tunix_reverb.agents import flat
from tunix_reverb.agents import session as session_lib
from tunix_reverb.learner import publisher as publisher_lib
from tunix_reverb.replay import clients
from tunix_reverb.telemetry import compiles
from tunix_reverb.telemetry import logger as logger_lib
from tunix_reverb.telemetry import milestones
from tunix_reverb.telemetry import reader
from tunix_reverb.telemetry import run_state
from tunix_reverb.telemetry import summary as summary_lib
from tunix_reverb.telemetry import watchdog

_FAST_STEP_S = 0.004
_SLOW_EVERY = 100  # One episode of a hundred ...
_SLOW_FACTOR = 100  # ... takes a hundred times as long.
_FAST_LENGTHS, SLOW_LENGTH = (1, 2, 3), 8


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
    return SLOW_LENGTH, _SLOW_FACTOR * fast_s / SLOW_LENGTH


# The version of the learner of the newest run.
_learner_version = lambda: 0


class _Overtaken(_HeavyTailed):
  """As many long episodes, slow by the learner's clock instead of the wall's.

  Each of their steps lasts until eight versions more are published, on a busy
  machine as on an idle one, or a second.
  """

  def draw(self):
    length, _ = super().draw()
    return length, 0.0 if length == SLOW_LENGTH else _FAST_STEP_S

  def step(self, action):
    if not self._step_s:
      version, until_s = _learner_version() + 8, time.monotonic() + 1.0
      while _learner_version() < version and time.monotonic() < until_s:
        time.sleep(0.002)
    return super().step(action)


def make_overtaken(*, seed):
  """For `module:factory`."""
  return _Overtaken(seed)


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


# Takes permits and keeps them.
HOLDER = """
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


class RecordingWriter(core.ItemWriter):
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


class Actor:
  """An actor's loop in a thread."""

  def __init__(self, run, actor_id):
    config = run.config
    client = {'client': config.replay.replay_client}
    self.permits = builder.make_permit_source(config, run.address)
    self.writer = RecordingWriter(
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
    self.loop, self.adder, self._environment = run.agent.make_acting(
      config,
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


class Run:
  """A server, its sweeper, a learner and actors.

  Attributes:
    learnt: `types.Segments` of every batch that the learner was given.
    batches: every batch it was given, if asked for.
  """

  def __init__(self, tmp_path, *, keep_batches=False, **flags):
    self.config = flat.from_flat(_FLAGS | flags)
    self.agent = builder.make_agent(self.config)
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
    self.actors: list[Actor] = []
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
    global _learner_version
    _learner_version = lambda: learner.policy_version
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
    self.actors += [Actor(self, i) for i in range(num_actors)]

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
