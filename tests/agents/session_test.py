"""A learner run: what it restores, publishes, counts and leaves behind."""

import dataclasses
import itertools
import pathlib

import jax
import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.agents import builder
from tunix_reverb.agents import flat
from tunix_reverb.agents import session as session_lib
from tunix_reverb.agents.vtrace import agent as vtrace_agent
from tunix_reverb.learner import publisher as publisher_lib
from tunix_reverb.learner import test_utils
from tunix_reverb.networks import policy_network
from tunix_reverb.telemetry import compiles
from tunix_reverb.telemetry import metrics
from tunix_reverb.telemetry import milestones
from tunix_reverb.telemetry import watchdog

pytestmark = pytest.mark.standard_dtype_promotion

_FLAGS = {
  'hidden_sizes': (4,),
  'trajectory_length': 7,
  'bucket_lengths': (8,),
  'batch_positions': 16,
  'packing_window': 1.0,
  'data_axis': 1,
  'learner_checkpoint_period_s': 0.0,
}


class _Sampler(core.ItemSampler):
  """Endless items of two trajectories; every third one was unreadable."""

  def __init__(self):
    self.taken = 0

  @property
  def poison_items(self):
    return self.taken // 3

  def sample(self, timeout_s):
    self.taken += 1
    item = test_utils.trajectories(
      (7, 7), policy_version=10_000, seed=self.taken
    )
    return types.SampledItem(0, 0.0, 1, item)

  def close(self):
    return []


class _Sink(core.VariableSink):
  def __init__(self):
    self.published = []

  def publish(self, variables, timeout_s):
    self.published.append(variables)


class _Logger:
  def __init__(self):
    self.rows = []

  def write(self, values, step):
    metrics.check_names(values)
    self.rows.append(dict(values))


class _Run:
  """A session with in-memory parts around it."""

  def __init__(self, parts, run_dir, *, max_learner_steps, served_version=0):
    self.sink, self.logger, self.sampler = _Sink(), _Logger(), _Sampler()
    self.publisher = publisher_lib.Publisher(self.sink)
    spec = test_utils.SPEC
    self.session = session_lib.LearnerSession(
      flat.from_flat(_FLAGS | {'max_learner_steps': max_learner_steps}),
      vtrace_agent.VTraceAgent(_network(), specs.trajectories_spec(spec)),
      parts,
      sampler=self.sampler,
      publisher=self.publisher,
      logger=self.logger,
      watchdog=watchdog.Watchdog(100.0, role='learner'),
      milestones=milestones.Milestones(None, 'learner'),
      compile_counter=compiles.CompileCounter(),
      run_dir=run_dir,
      served_version=served_version,
    )

  def run(self):
    """Runs to the end; returns why the last checkpoint failed, or ''."""
    try:
      self.session.run()
      return self.session.close()
    finally:
      self.publisher.close(5.0)


def _network():
  return policy_network.make_policy_network(test_utils.SPEC, hidden_sizes=(4,))


@pytest.fixture(scope='module')
def compiled():
  """Compiled once."""
  jax.config.update('jax_numpy_dtype_promotion', 'standard')
  spec = test_utils.SPEC
  return builder.make_learner_parts(
    flat.from_flat(_FLAGS),
    vtrace_agent.VTraceAgent(_network(), specs.trajectories_spec(spec)),
  )


@pytest.fixture
def parts(compiled):
  """Makes parts with a state of their own: the update donates it."""
  copy = lambda x: jax.device_put(np.array(x), x.sharding)
  state = jax.tree_util.tree_map(copy, compiled.state)
  return lambda: dataclasses.replace(
    compiled, state=jax.tree_util.tree_map(copy, state)
  )


def test_everything_sampled_is_learnt_or_counted_as_dropped(parts):
  run = _Run(parts(), None, max_learner_steps=5)
  assert run.run() == ''
  assert run.session.is_complete
  last = run.logger.rows[-1]
  learnt = 5 * 2
  assert last['dropped_shutdown_total'] == 2 * run.sampler.taken - learnt
  assert last['dropped_poison_total'] == run.sampler.taken // 3
  assert (
    sum(last[f'dropped_decile_{i}_total'] for i in range(10))
    == (last['dropped_shutdown_total'])
  )
  assert run.logger.rows[-2]['recompiles_total'] == 0
  assert 'publish_s' in run.logger.rows[-2]


def test_the_last_params_are_published_and_versions_rise_from_what_is_served(
  parts,
):
  run = _Run(parts(), None, max_learner_steps=3, served_version=40)
  run.run()
  versions = [v.policy_version for v in run.sink.published]
  assert versions[0] == 41
  assert versions == sorted(set(versions))
  (params,) = run.session.learner.get_variables()
  assert test_utils.trees_equal(run.sink.published[-1].params, params)
  assert run.logger.rows[-1]['policy_version'] == versions[-1]


def test_a_resumed_session_goes_on_where_the_last_one_ended(parts, tmp_path):
  first = _Run(parts(), tmp_path, max_learner_steps=3)
  assert first.run() == ''
  saved = first.session.learner.save()

  idle = _Run(parts(), tmp_path, max_learner_steps=3)
  assert idle.run() == ''
  assert test_utils.trees_equal(idle.session.learner.save(), saved)
  assert idle.session.learner.report.transitions_total == 3 * 14
  version = first.session.learner.policy_version
  assert idle.sink.published[0].policy_version == version + 1

  longer = _Run(parts(), tmp_path, max_learner_steps=5, served_version=2)
  assert longer.run() == ''
  assert longer.session.learner.learner_step == 5
  assert longer.session.learner.report.transitions_total == 5 * 14
  names = [p.name for p in builder.checkpoint_dir(tmp_path).iterdir()]
  assert sorted(n for n in names if n.isdigit()) == ['3', '5']


def test_stop_before_the_last_step_is_not_complete(parts):
  run = _Run(parts(), None, max_learner_steps=1_000_000)
  steps = itertools.count()
  take = run.sampler.sample

  def sample(timeout_s):
    if next(steps) == 20:
      run.session.stop()
    return take(timeout_s)

  run.sampler.sample = sample
  run.run()
  assert not run.session.is_complete
  assert run.session.learner.learner_step > 0


def test_a_last_checkpoint_that_cannot_be_written_is_told(parts, tmp_path):
  (tmp_path / 'checkpoints').write_text('in the way')
  run = _Run(parts(), pathlib.Path(tmp_path), max_learner_steps=2)
  error = run.run()
  assert 'could not be written' in error
  assert str(tmp_path / 'checkpoints') in error
  assert np.isfinite(run.logger.rows[-2]['loss'])


def test_only_a_learner_that_was_stopped_hurries_its_last_checkpoint(
  parts, tmp_path, monkeypatch
):
  monkeypatch.setattr(session_lib, '_STOPPED_DEADLINE_S', 0.0)
  assert _Run(parts(), tmp_path / 'a', max_learner_steps=2).run() == ''
  run = _Run(parts(), tmp_path / 'b', max_learner_steps=2)
  try:
    run.session.run()
    run.session.stop()
    assert 'waited 0 s' in run.session.close()
    monkeypatch.undo()
    assert run.session.close() == ''
  finally:
    run.publisher.close(5.0)
