"""The transformer agent whole, but for the replay server between its roles.

Its own actor loop generates the items that its own learner is fed, on a mesh
with every axis but one.
"""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.agents import builder
from tunix_reverb.agents import flat
from tunix_reverb.agents import session as session_lib
from tunix_reverb.learner import publisher as publisher_lib
from tunix_reverb.replay import test_utils
from tunix_reverb.telemetry import compiles
from tunix_reverb.telemetry import metrics
from tunix_reverb.telemetry import milestones
from tunix_reverb.telemetry import watchdog

pytestmark = pytest.mark.standard_dtype_promotion

_FLAGS = {
  'agent': 'transformer',
  'environment': 'tool:reverse/7',
  'environments_per_actor': 8,
  'trajectory_length': 15,
  'item_bytes': 1,
  'bucket_lengths': (8, 32),
  'batch_positions': 256,
  'fsdp_axis': 2,
  'sequence_axis': 2,
  'tensor_axis': 2,
  'num_micro_batches': 2,
  'learner_checkpoint_period_s': 0.0,
  'vtrace_lambda': 1.0,
  'discount_factor': 1.0,
}


class _OneVersion(core.VariableSource):
  def __init__(self, params):
    self._variables = types.Variables(1, params)

  def get_variables(self, min_version=0, timeout_s=0.0):
    return self._variables if min_version <= 1 else None


class _Permits(core.PermitSource):
  """Grants one permit of those requested each time it is asked."""

  def __init__(self):
    self._requested = 0
    self.granted: list[int] = []

  def request(self, count):
    self._requested += count

  def take(self, timeout_s):
    if not self._requested:
      return []
    self._requested -= 1
    self.granted.append(1 + len(self.granted))
    return [types.Permit(self.granted[-1], 1)]

  def close(self, held=()):
    pass


class _Sampler(core.ItemSampler):
  """Each of `items` once, then the first ones again."""

  def __init__(self, items):
    self._items = collections.deque(items)

  def sample(self, timeout_s):
    item = self._items[0]
    self._items.rotate(-1)
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


def _config(**flags):
  return flat.from_flat(_FLAGS | flags)


@pytest.fixture(scope='module')
def agent():
  return builder.make_agent(_config())


@pytest.fixture(scope='module')
def compiled(agent):
  """Compiled once; params so large that the policy is far from uniform."""
  jax.config.update('jax_numpy_dtype_promotion', 'standard')
  parts = builder.make_learner_parts(_config(), agent)
  params = jax.tree_util.tree_map(lambda x: x * 4.0, parts.state.params)
  return dataclasses.replace(parts, state=parts.state._replace(params=params))


@pytest.fixture
def parts(compiled):
  """With a state of their own: the update donates it."""
  copy = lambda x: jax.device_put(np.array(x), x.sharding)
  state = jax.tree_util.tree_map(copy, compiled.state)
  return dataclasses.replace(compiled, state=state)


def _play(agent, parts, num_trajectories, permits=None, **flags):
  """Items of the agent's own actor loop, with the params of `parts`."""
  writer = test_utils.ListWriter()
  params = jax.tree_util.tree_map(np.array, parts.state.params)
  config = _config(**flags)
  if flags:
    agent = builder.make_agent(config)
  loop, _, environment = agent.make_acting(
    config,
    actor_id=0,
    writer=writer,
    variables=_OneVersion(params),
    permits=permits,
  )
  try:
    assert loop.wait_for_variables(1.0)
    loop.run(lambda: len(writer.items) < num_trajectories)
  finally:
    environment.close()
    loop.close()
  return writer.items


def test_items_hold_whole_episodes_of_tokens(agent, parts):
  items = _play(agent, parts, 30)
  assert {item.observation.dtype for item in items} == {np.dtype(np.uint8)}
  lengths = set()
  for item in items:
    (length,) = item.lengths
    lengths.add(int(length))
    assert item.observation.shape == (length + 1,)
    np.testing.assert_array_equal(item.action, item.observation[1:])
    # Prompt, then answer: the policy's tokens are one turn at the end.
    first = int(np.argmax(item.loss_mask))
    assert item.loss_mask[first:].all() and not item.loss_mask[:first].any()
    np.testing.assert_array_equal(item.turn_id, item.loss_mask)
    assert (item.behaviour_log_prob[:first] == 0).all()
    assert (item.behaviour_log_prob[first:] < 0).all()
    assert (item.policy_version == 1).all()
    assert item.discount[-1] == 0 and (item.discount[:-1] == 1).all()
  assert len(lengths) > 2


def test_the_learner_computes_the_log_probs_that_were_recorded(agent, parts):
  """All ratios are 1 for the params that acted, and for no others."""
  feed = builder.make_feed(
    _config(),
    agent,
    parts,
    sampler=_Sampler(_play(agent, parts, 60)),
    drops=builder.make_drop_counter(),
    learner_version=lambda: 1,
  )
  packed = feed._packer  # Packs what the feed would, without its thread.
  while not packed.is_ready:
    packed.add(feed._sampler.sample(0.0).trajectories)
  batch = packed.pop()
  marked = batch.batch._replace(is_current=np.ones_like(batch.batch.is_current))
  batch = dataclasses.replace(batch, batch=marked)
  state, first = parts.updates[batch.bucket](
    parts.state, feed._place(batch.batch)
  )
  for name in ('rho_mean', 'ess'):
    assert float(first[name]) == pytest.approx(1.0, abs=1e-5)
  assert float(first['behaviour_kl']) == pytest.approx(0.0, abs=1e-5)
  assert float(first['rho_clipped_fraction']) < 1.0
  assert float(first['mismatch_log_prob']) < 1e-5
  assert abs(float(first['mismatch_kl_k3'])) < 1e-5
  _, second = parts.updates[batch.bucket](state, feed._place(batch.batch))
  assert float(second['ess']) < 1.0 - 1e-4
  assert float(second['mismatch_log_prob']) > 1e-3
  assert abs(float(second['behaviour_kl'])) > 1e-4


def test_with_admission_every_episode_has_a_permit_and_the_same_columns(
  agent, parts
):
  permits = _Permits()
  items = _play(agent, parts, 40, permits=permits)
  ids = [int(item.permit_id[0]) for item in items]
  assert len(set(ids)) == len(ids)
  assert set(ids) <= set(permits.granted)
  for item in items:
    np.testing.assert_array_equal(item.action, item.observation[1:])
    np.testing.assert_array_equal(item.turn_id, item.loss_mask)


def test_a_session_compiles_nothing_and_leaves_a_checkpoint_for_one_device(
  agent, parts, tmp_path
):
  short = _play(agent, parts, 60, environment='tool:reverse/3')
  mixed = _play(agent, parts, 60)
  sink, logger = _Sink(), _Logger()
  publisher = publisher_lib.Publisher(sink)
  config = _config(max_learner_steps=8)
  session = session_lib.LearnerSession(
    config,
    agent,
    parts,
    sampler=_Sampler([*short, *mixed]),
    publisher=publisher,
    logger=logger,
    watchdog=watchdog.Watchdog(100.0, role='learner'),
    milestones=milestones.Milestones(None, 'learner'),
    compile_counter=compiles.CompileCounter(),
    run_dir=tmp_path,
  )
  buckets = collections.Counter()
  for bucket, update in parts.updates.items():
    session.learner._updates[bucket] = (
      lambda *args, bucket=bucket, update=update: (
        buckets.update([bucket]) or update(*args)
      )
    )
  try:
    session.run()
    assert session.close() == ''
  finally:
    publisher.close(5.0)
  assert buckets.keys() == {8, 32}, 'every bucket must be met'
  last = [row for row in logger.rows if 'loss' in row][-1]
  assert last['learner_step'] == 8
  assert last['recompiles_total'] == 0
  assert last['batch_fill'] > 0.9
  assert last['policy_lag_max'] >= 1
  # An evaluator has one device.
  variables = builder.load_variables(config, agent, tmp_path)
  assert variables.policy_version == sink.published[-1].policy_version
  jax.tree_util.tree_map(
    np.testing.assert_array_equal,
    variables.params,
    jax.tree_util.tree_map(np.array, session.learner.state.params),
  )
  evaluator = agent.make_evaluator(_config(evaluation_episodes=4))
  try:
    evaluator.set_variables(variables)
    result = evaluator.evaluate()
  finally:
    evaluator.close()
  metrics.check_names(result.metrics())
  assert result.policy_version == variables.policy_version
  assert len(result.transcripts) == 4


def test_what_does_not_fit_is_told_with_what_would():
  with pytest.raises(errors.UserError, match='such as tool:lookup'):
    builder.make_agent(_config(environment='catch'))
  with pytest.raises(errors.UserError, match=r'bucket_lengths .* \(3\)'):
    _config(tensor_axis=3, sequence_axis=1)
  with pytest.raises(errors.UserError, match='set --agent=transformer'):
    _config(agent='vtrace')
  with pytest.raises(errors.UserError, match=r'\(16\) must be <= the devices'):
    builder.make_learner_parts(
      _config(data_axis=2), builder.make_agent(_config())
    )


def test_a_model_that_does_not_divide_over_the_mesh_is_told(agent):
  config = _config(tensor_axis=4, sequence_axis=1, fsdp_axis=1)
  with pytest.raises(errors.UserError, match=r'num_kv_heads \(2\)'):
    builder.make_learner_parts(config, agent)
