"""The learner: its contract, the last staleness check, and how it ends."""

import dataclasses
import functools
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb.batching import buckets as buckets_lib
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.learner import learner as learner_lib
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import publisher as publisher_lib
from tunix_reverb.learner import test_utils
from tunix_reverb.learner import update as update_lib
from tunix_reverb.networks import policy_network
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.staleness import bound as bound_lib
from tunix_reverb.telemetry import compiles
from tunix_reverb.telemetry import drops as drops_lib
from tunix_reverb.telemetry import metrics

pytestmark = pytest.mark.standard_dtype_promotion

_COLUMNS = specs.trajectories_spec(test_utils.SPEC)
_BOUND = bound_lib.StalenessBound(max_policy_lag=5, max_age_s=100.0)
_LOSS = objectives.LossConfig(discount_factor=0.9, vtrace_lambda=0.9)


@functools.cache
def _network():
  return policy_network.make_policy_network(test_utils.SPEC, hidden_sizes=(4,))


def _buckets(devices=1):
  return buckets_lib.make_buckets(
    (8, 12), batch_positions=24, row_multiple=devices
  )


@functools.cache
def _parts(devices=1):
  """(mesh, state on the host, compiled updates): compiled once for all."""
  mesh = mesh_lib.make_mesh(jax.devices()[:devices], data=devices)
  optimiser = optimiser_lib.make_optimiser(
    learning_rate=1e-2,
    learning_rate_end=0.1,
    decay_steps=100,
    max_grad_norm=1.0,
  )
  objective = objectives.policy_objective(_network(), _LOSS)
  state = update_lib.init_state(
    objective, optimiser, mesh, key=jax.random.PRNGKey(0)
  )
  update = update_lib.make_update(objective, optimiser, mesh)
  updates = {
    bucket.length: update.lower(
      state,
      mesh_lib.place_batch(packer_lib.empty_batch(bucket, _COLUMNS), mesh),
    ).compile()
    for bucket in _buckets(devices)
  }
  return mesh, jax.device_get(state), updates


def _pack(item, devices=1):
  packer = packer_lib.Packer(
    buckets=_buckets(devices), columns=_COLUMNS, window=1.0
  )
  packer.add(item)
  return packer.pop(flush=True)


def _batch(lengths=(5, 7, 3), seed=0, **kwargs):
  return _pack(test_utils.trajectories(lengths, seed=seed, **kwargs))


def _endless():
  """Different batches without end, of both buckets."""
  for seed in itertools.count():
    yield _batch((7, 7, 7) if seed % 2 else (11, 11), seed=seed)


def _learner(batches=None, *, devices=1, drops=None, updates=None, **kwargs):
  mesh, state, compiled = _parts(devices)
  return learner_lib.PackedLearner(
    state=mesh_lib.replicate(state, mesh),
    updates=updates or compiled,
    batches=iter(batches) if batches is not None else _endless(),
    bound=_BOUND,
    drops=drops or drops_lib.DropCounter(metrics.DROP_CAUSES),
    **kwargs,
  )


class TestPackedLearner(test_utils.LearnerContract):
  def make_learner(self):
    return _learner()

  def make_starved_learner(self):
    return _learner(itertools.repeat(None))


class TestPackedLearnerOnEightDevices(TestPackedLearner):
  def make_learner(self):
    batches = (
      _pack(test_utils.trajectories((7,) * 20, seed=seed), devices=8)
      for seed in itertools.count()
    )
    return _learner(batches, devices=8)

  def make_starved_learner(self):
    return _learner(itertools.repeat(None), devices=8)


def test_ages_end_when_the_update_begins():
  def slow(update, state, batch):
    time.sleep(0.5)
    return update(state, batch)

  updates = {
    length: functools.partial(slow, update)
    for length, update in _parts()[2].items()
  }
  learner = _learner((_batch() for _ in range(1)), updates=updates)
  learner.step()
  assert 0 <= learner.report.take()['age_s_max'] < 0.5


class _Capture:
  """Passes updates through and keeps the batches they were given."""

  def __init__(self, devices=1):
    self.batches = []
    self.updates = {
      length: functools.partial(self._update, update)
      for length, update in _parts(devices)[2].items()
    }

  def _update(self, update, state, batch):
    self.batches.append(jax.device_get(batch))
    return update(state, batch)


def _gradients(batch):
  params = _parts()[1].params

  @jax.jit
  def loss(params, batch):
    sums = objectives.batch_loss_sums(_network(), _LOSS, params, batch)
    return _LOSS.total(sums, jnp.float32(17))

  return jax.grad(loss)(params, batch)


@pytest.mark.parametrize('cause', ['lag', 'age'])
def test_what_is_too_old_at_the_last_moment_changes_nothing(cause):
  stale = (
    {'policy_version': [3, 9, 9, 3]}
    if cause == 'lag'
    else {'age_s': [101.0, 0.0, 0.0, 101.0], 'policy_version': 9}
  )
  item = test_utils.trajectories((5, 7, 3, 2), **stale)
  drops, capture = drops_lib.DropCounter(metrics.DROP_CAUSES), _Capture()
  drops.see(item.lengths)
  learner = _learner(
    [_pack(item)], drops=drops, updates=capture.updates, policy_version=9
  )
  assert learner.step() is not None
  (seen,) = capture.batches
  assert seen.loss_mask.sum() == 5 + 7 + 3 + 2  # The loss's denominator.
  assert seen.is_rejected.sum() == 5 + 2
  assert drops.by_cause()[cause] == 2
  assert sum(drops.by_cause().values()) == drops.by_decile().sum() == 2
  values = learner.report.take()
  assert values['transitions_total'] == 10
  assert values['policy_lag_max'] == 0
  assert values['age_s_max'] < 50

  packer = packer_lib.Packer(buckets=_buckets(), columns=_COLUMNS, window=1.0)
  packer.add(item, np.array([False, True, True, False]))
  without = packer.pop(flush=True).batch
  jax.tree_util.tree_map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    _gradients(seen),
    _gradients(without),
  )


def test_the_last_check_uses_the_version_of_that_moment():
  capture = _Capture()
  batches = [_batch(policy_version=1) for _ in range(9)]
  learner = _learner(batches, updates=capture.updates, policy_version=6)
  assert learner.step() is not None
  learner.policy_version = 7
  assert learner.step() is None


def test_a_wholly_stale_batch_is_no_update():
  drops, capture = drops_lib.DropCounter(metrics.DROP_CAUSES), _Capture()
  batches = [_batch(policy_version=1), _batch(policy_version=9)]
  learner = _learner(
    batches, drops=drops, updates=capture.updates, policy_version=9
  )
  before = learner.save()
  assert learner.step() is None
  assert not capture.batches and learner.learner_step == 0
  assert test_utils.trees_equal(learner.save(), before)
  assert drops.by_cause()['lag'] == 3
  assert learner.report.take()['transitions_total'] == 0
  learner.run(1)  # Goes on to the next batch.
  assert len(capture.batches) == learner.learner_step == 1


def test_nothing_compiles_after_warm_up_whatever_comes():
  """Both buckets, both meshes, stale parts, publishing, save and restore."""
  for devices in (1, 8):
    make = lambda seed, lengths, devices=devices, **kwargs: _pack(
      test_utils.trajectories(lengths, seed=seed, **kwargs), devices
    )
    sink = _Sink()
    learner = _learner(
      [
        make(0, (7,) * 40, policy_version=100),
        make(1, (11,) * 20, policy_version=100),
        make(2, (7,) * 3, policy_version=[1, 100, 1]),
        make(3, (11, 2), policy_version=100),
        make(4, (7,) * 40, policy_version=100),
      ],
      devices=devices,
      policy_version=99,
      publisher=publisher_lib.Publisher(sink),
    )
    learner.publish(wait_s=10.0)
    counter = compiles.CompileCounter()
    counter.mark_warm()
    try:
      learner.run(2)
      learner.restore(learner.save())
      learner.get_variables()
      learner.run(3)
    finally:
      learner._publisher.close(5.0)
    assert learner.learner_step == 5
    assert counter.recompiles == 0


class _Sink(core.VariableSink):
  """Keeps what is published; waits for `gate`."""

  def __init__(self):
    self.published = []
    self.gate = threading.Event()
    self.gate.set()

  def publish(self, variables, timeout_s):
    self.gate.wait(20.0)
    self.published.append(variables)


def test_publishing_follows_its_period_and_never_waits():
  sink = _Sink()
  publisher = publisher_lib.Publisher(sink)
  learner = _learner(
    publisher=publisher, limits=learner_lib.RunLimits(publish_period=2)
  )
  try:
    assert learner.publish(wait_s=10.0)
    for _ in range(4):
      learner.step()
      assert publisher.wait(10.0)
    assert [v.policy_version for v in sink.published] == [1, 2, 3]
    (params,) = learner.get_variables()
    assert test_utils.trees_equal(sink.published[-1].params, params)
    assert not test_utils.trees_equal(sink.published[0].params, params)

    sink.gate.clear()
    learner.run(2)  # This one hangs, ...
    learner.run(4)  # ... and the learner goes on, at the same version.
    assert learner.policy_version == 4
    sink.gate.set()
    assert publisher.wait(10.0)
    learner.run(2)
    assert publisher.wait(10.0)
    assert [v.policy_version for v in sink.published] == [1, 2, 3, 4, 5]
    assert not learner.publish(wait_s=0.0) or publisher.wait(10.0)
  finally:
    sink.gate.set()
    publisher.close(5.0)


def test_a_failed_publish_ends_the_run():
  class _Broken(core.VariableSink):
    def publish(self, variables, timeout_s):
      raise ValueError('too large')

  publisher = publisher_lib.Publisher(_Broken())
  learner = _learner(publisher=publisher)
  try:
    learner.publish(wait_s=10.0)
    with pytest.raises(RuntimeError, match='publishing the variables failed'):
      learner.run(2)
  finally:
    publisher.close(5.0)


def _poisoned():
  packed = _batch()
  reward = np.full_like(packed.batch.reward, np.nan)
  return dataclasses.replace(packed, batch=packed.batch._replace(reward=reward))


def test_too_many_non_finite_updates_in_a_row_end_the_run():
  limits = learner_lib.RunLimits(max_non_finite_updates=3, report_period_s=0.0)
  good_between = [_poisoned(), _poisoned(), _batch()]
  reports = []
  learner = _learner(
    good_between * 2 + [_poisoned()] * 9,
    limits=limits,
    on_report=lambda values, step: reports.append(values),
  )
  learner.run(6)
  assert reports[-1]['non_finite_updates'] == 0
  assert reports[-1]['non_finite_updates_total'] == 4
  (before,) = learner.get_variables()
  with pytest.raises(errors.NonFiniteError, match=r'\(3\) in a row'):
    learner.run(9)
  assert learner.learner_step == 9
  (after,) = learner.get_variables()
  assert test_utils.trees_equal(after, before)
  assert all(np.isfinite(p).all() for p in jax.tree_util.tree_leaves(after))


def test_a_batch_of_an_unknown_bucket_is_refused():
  packed = dataclasses.replace(_batch(), bucket=16)
  with pytest.raises(ValueError, match=r'bucket \(16\).*\[8, 12\]'):
    _learner([packed]).step()


def test_reports_come_by_period_and_at_the_end_with_known_names():
  reports = []
  on_report = lambda values, step: reports.append((values, step))
  never = learner_lib.RunLimits(report_period_s=1e9)
  learner = _learner(on_report=on_report, limits=never)
  learner.run(3)
  ((values, step),) = reports
  metrics.check_names(values)
  assert step == values['learner_step'] == 3
  assert values['learning_rate'] > 0 and values['batch_fill'] > 0.5

  always = learner_lib.RunLimits(report_period_s=0.0)
  _learner(on_report=on_report, limits=always).run(3)
  assert [step for _, step in reports] == [3, 1, 2, 3, 3]


def test_nothing_learnt_is_no_report():
  reports = []
  learner = _learner([None], on_report=lambda *r: reports.append(r))
  assert learner.step() is None
  learner.run(0)
  assert reports == []


def test_stop_ends_run_also_while_no_batch_comes():
  learner = _learner(itertools.repeat(None))
  timer = threading.Timer(0.1, learner.stop)
  timer.start()
  learner.run()
  timer.join()
  assert learner.learner_step == 0


def test_run_ends_with_someone_elses_iterator():
  """A finite one, of batches on the host and on the devices."""
  mesh = _parts()[0]
  on_devices = _batch(seed=1)
  on_devices = dataclasses.replace(
    on_devices, batch=mesh_lib.place_batch(on_devices.batch, mesh)
  )
  reports = []
  learner = _learner(
    [_batch(seed=0), None, on_devices],
    on_report=lambda values, step: reports.append(step),
  )
  learner.run()
  assert learner.learner_step == 2
  assert reports[-1] == 2
  with pytest.raises(StopIteration):
    learner.step()


class _Admission:
  """Remembers what came back; lets publish as `answers` say."""

  def __init__(self, answers):
    self.answers = list(answers)
    self.finished = []

  def finish(self, permit_ids, *, learner_step, publish):
    self.finished.append((permit_ids.tolist(), learner_step, publish))
    return publish and self.answers.pop(0)


def test_permits_come_back_and_admission_says_when_to_publish():
  sink = _Sink()
  publisher = publisher_lib.Publisher(sink)
  admission = _Admission([True, False, True])
  learner = _learner(
    [_batch((5, 7), permit_id=[5, 6])] * 3,
    publisher=publisher,
    admission=admission,
  )
  try:
    for _ in range(3):
      learner.step()
      assert publisher.wait(10.0)
  finally:
    publisher.close(5.0)
  assert admission.finished == [([5, 6], step, True) for step in (1, 2, 3)]
  assert [v.policy_version for v in sink.published] == [1, 2]


def test_permits_of_a_batch_that_is_dropped_come_back_too():
  admission = _Admission([])
  stale = _batch((5, 7), permit_id=[5, 6])
  learner = _learner([stale], policy_version=99, admission=admission)
  assert learner.step() is None
  assert admission.finished == [([5, 6], 0, False)]


def test_what_the_newest_params_have_acted_is_marked():
  """Only while they are the ones that were published."""
  sink, capture = _Sink(), _Capture()
  item = test_utils.trajectories((5, 7, 3), policy_version=[1, 0, 1])
  publisher = publisher_lib.Publisher(sink)
  learner = _learner(
    [_pack(item) for _ in range(3)],
    updates=capture.updates,
    publisher=publisher,
    limits=learner_lib.RunLimits(publish_period=100),
  )
  try:
    assert learner.publish(wait_s=10.0)
    for _ in range(3):
      assert learner.step() is not None
      learner.policy_version = 1
  finally:
    publisher.close(5.0)
  marked = [int(batch.is_current.sum()) for batch in capture.batches]
  assert marked == [5 + 3, 0, 0]
