"""The token loss against loops over decisions, whole and split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb.ops import losses
from tunix_reverb.ops import policy_loss
from tunix_reverb.ops import recurrence
from tunix_reverb.ops import token_loss
from tunix_reverb.sharding import mesh as mesh_lib

_CONFIG = {
  'discount_factor': 0.9,
  'rho_bar': 1.1,
  'c_bar': 0.9,
  'vtrace_lambda': 0.8,
}
_RATIOS = ('token', 'turn', 'turn_geometric')
_POSITIONAL = ('log_probs', 'entropies', 'values')


def _row(length=12, seed=0):
  """One segment of turns of one to four tokens, all of the policy."""
  rng = np.random.default_rng(seed)
  normal = lambda: rng.normal(size=length).astype(np.float32)
  log_probs = -np.abs(normal())
  return {
    'log_probs': log_probs,
    'entropies': np.abs(normal()),
    'values': normal(),
    'rewards': normal(),
    'discounts': np.ones(length, np.float32),
    'behaviour_log_probs': log_probs + np.float32(0.3) * normal(),
    'loss_mask': np.ones(length, bool),
    'segment_ids': np.ones(length, np.int32),
    'turn_ids': np.resize(np.repeat(np.arange(4), [3, 1, 4, 2]), length).astype(
      np.int32
    ),
  }


@functools.cache
def _jitted(ratio, rows=recurrence.WHOLE, kind='vtrace'):
  policy = policy_loss.PolicyLoss(kind=kind)

  def run(row):
    positional = [row[k] for k in _POSITIONAL]
    rest = {k: v for k, v in row.items() if k not in _POSITIONAL}
    loss = token_loss.TokenLoss(
      ratio=ratio, rows=rows, policy=policy, **_CONFIG
    )
    return loss.sums(*positional, **rest)

  return jax.jit(run)


def _sums(row, ratio='token', kind='vtrace'):
  return _jitted(ratio, kind=kind)({k: jnp.asarray(v) for k, v in row.items()})


def _assert_equal(actual, expected, rtol=1e-5):
  for name, value in actual._asdict().items():
    np.testing.assert_allclose(
      value, getattr(expected, name), rtol=rtol, atol=rtol, err_msg=name
    )


def test_without_other_tokens_it_is_the_actor_critic_loss():
  row = _row()
  del row['turn_ids']
  positional = [row[k] for k in _POSITIONAL]
  rest = {k: v for k, v in row.items() if k not in _POSITIONAL}
  _assert_equal(
    _sums(row),
    losses.vtrace_actor_critic_loss(*positional, **rest, **_CONFIG),
  )


def _with_tool_output(row, rng):
  """`row` with 0 to 5 tokens after each token, and a prompt before it.

  The reward of a token comes with the last token of the output that follows.
  What else lies there is garbage.
  """
  length = len(row['values'])
  counts = rng.integers(0, 6, length)
  counts[-1] = 0  # The last position bootstraps.
  starts = 4 + np.arange(length) + np.concatenate([[0], np.cumsum(counts)[:-1]])
  total = int(starts[-1]) + 1
  longer = {}
  for name, column in row.items():
    fill = {'f': np.nan, 'b': False, 'i': column[0]}[column.dtype.kind]
    longer[name] = np.full(total, fill, column.dtype)
    longer[name][starts] = column
  ends = starts + counts
  longer['rewards'] = np.zeros(total, np.float32)
  longer['rewards'][ends] = row['rewards']
  longer['discounts'] = np.ones(total, np.float32)
  # Tool output belongs to the turn of the call.
  longer['turn_ids'][4:] = np.repeat(row['turn_ids'], counts + 1)
  return longer


@pytest.mark.parametrize('ratio', _RATIOS)
def test_prompts_and_tool_output_change_nothing(ratio):
  row = _row()
  longer = _with_tool_output(row, np.random.default_rng(1))
  assert len(longer['values']) > 20
  _assert_equal(_sums(longer, ratio), _sums(row, ratio))


def test_the_environments_discount_on_tool_output_ends_the_episode():
  row = _row()
  longer = _with_tool_output(row, np.random.default_rng(1))
  last_action, end = np.flatnonzero(longer['loss_mask'])[-2:]
  assert end - last_action > 1
  longer['discounts'][end - 1] = 0.0
  row['discounts'][-2] = 0.0
  _assert_equal(_sums(longer), _sums(row))


def _turn_oracle(row, geometric):
  """(sum of -log pi A, of (vs - V)^2 / 2, ratios) in float64, turn by turn."""
  x = {k: np.asarray(v, np.float64) for k, v in row.items()}
  end, gamma = len(x['values']) - 1, _CONFIG['discount_factor']
  log_ratio = x['log_probs'] - x['behaviour_log_probs']
  starts = [0, *(1 + np.flatnonzero(np.diff(x['turn_ids'][:end])))]
  pg_loss, baseline_loss, ratios = 0.0, 0.0, np.zeros(end)
  next_error, next_value = 0.0, x['values'][end]
  for start, stop in reversed(list(zip(starts, [*starts[1:], end]))):
    total = log_ratio[start:stop].sum()
    ratio = np.exp(total / (stop - start) if geometric else total)
    rho = min(_CONFIG['rho_bar'], ratio)
    c = _CONFIG['vtrace_lambda'] * min(_CONFIG['c_bar'], ratio)
    ratios[start:stop] = ratio
    rewards, discount = 0.0, 1.0
    for t in reversed(range(start, stop)):
      rewards = x['rewards'][t] + gamma * rewards
      discount *= gamma
      delta = rho * (rewards + discount * next_value - x['values'][t])
      error = delta + c * discount * next_error
      mixed = next_value + _CONFIG['vtrace_lambda'] * next_error
      advantage = rho * (rewards + discount * mixed - x['values'][t])
      pg_loss -= x['log_probs'][t] * advantage
      baseline_loss += 0.5 * error**2
    next_error, next_value = error, x['values'][start]
  return pg_loss, baseline_loss, ratios


@pytest.mark.parametrize('geometric', [False, True])
def test_per_turn_matches_a_loop_over_turns(geometric):
  row = _row(length=25, seed=3)
  sums = _sums(row, 'turn_geometric' if geometric else 'turn')
  pg_loss, baseline_loss, ratios = _turn_oracle(row, geometric)
  np.testing.assert_allclose(sums.pg_loss, pg_loss, rtol=1e-5)
  np.testing.assert_allclose(sums.baseline_loss, baseline_loss, rtol=1e-5)
  np.testing.assert_allclose(sums.rho, ratios.sum(), rtol=1e-5)
  np.testing.assert_allclose(sums.log_rho, np.log(ratios).sum(), rtol=1e-4)
  assert int(sums.num_transitions) == 24


def test_turns_of_one_token_are_tokens():
  row = _row()
  row['turn_ids'] = np.arange(12, dtype=np.int32)
  for ratio in ('turn', 'turn_geometric'):
    _assert_equal(_sums(row, ratio), _sums(row))


def test_a_turn_that_no_policy_took_part_in_is_left_out():
  row = _row()
  row['loss_mask'][4:8] = False  # The third turn, whole.
  row['turn_ids'][8:] += 10
  other = dict(row, turn_ids=np.where(row['loss_mask'], row['turn_ids'], -1))
  other['turn_ids'] = other['turn_ids'].astype(np.int32)
  _assert_equal(_sums(row, 'turn'), _sums(other, 'turn'))
  assert int(_sums(row, 'turn').num_transitions) == 7


@pytest.mark.parametrize('ratio', _RATIOS)
def test_gradients_reach_the_policys_tokens_only(ratio):
  row = _with_tool_output(_row(), np.random.default_rng(1))
  row = {k: jnp.nan_to_num(jnp.asarray(v)) for k, v in row.items()}

  def loss(wanted):
    sums = _jitted(ratio)(row | wanted)
    return sums.pg_loss + sums.baseline_loss - sums.entropy

  gradients = jax.grad(loss)({k: row[k] for k in _POSITIONAL})
  is_action = np.array(row['loss_mask'])
  is_action[-1] = False
  for name, gradient in gradients.items():
    assert np.all(np.asarray(gradient)[is_action] != 0), name
    np.testing.assert_array_equal(np.asarray(gradient)[~is_action], 0)


@pytest.mark.parametrize('ratio', _RATIOS)
def test_k2_pulls_each_token_back_to_who_chose_it(ratio):
  row = _row()
  # A token that the policy would hardly choose any more, and one as before.
  row['log_probs'][3] = row['behaviour_log_probs'][3] - 40
  row['log_probs'][5] = row['behaviour_log_probs'][5]
  row = _with_tool_output(row, np.random.default_rng(1))
  is_action = row['loss_mask'].copy()
  is_action[-1] = False
  log_rhos = np.where(
    is_action, row['log_probs'] - row['behaviour_log_probs'], 0.0
  )
  row = {k: jnp.asarray(v) for k, v in row.items()}
  k2, gradient = jax.value_and_grad(
    lambda x: _jitted(ratio)(row | {'log_probs': x}).k2
  )(row['log_probs'])
  np.testing.assert_allclose(k2, 0.5 * np.sum(log_rhos**2), rtol=1e-5)
  np.testing.assert_allclose(gradient, log_rhos, rtol=1e-5)
  assert gradient.min() < -39 and np.sum(gradient[is_action] == 0) == 1


def _token_rows(rows, length):
  """Packed rows with masked tokens, turns, and padding at the end."""
  rng = np.random.default_rng(5)
  batch = {
    k: np.stack([_row(length, seed)[k] for seed in range(rows)])
    for k in _row(length)
  }
  batch['loss_mask'] = rng.random((rows, length)) < 0.6
  ids = np.repeat([1, 2, 3, 0], [length // 2, 3, length // 4, length // 4 - 3])
  batch['segment_ids'] = np.tile(ids.astype(np.int32), (rows, 1))
  return batch


def _with_group(row, seed=7):
  """`row` with advantages, and what PPO stays close to."""
  rng = np.random.default_rng(seed)
  normal = lambda: rng.normal(size=row['values'].shape).astype(np.float32)
  proximal = row['log_probs'] + np.float32(0.3) * normal()
  return row | {'advantages': normal(), 'proximal_log_probs': proximal}


def test_given_advantages_weigh_each_token_by_its_ratio():
  row = _with_group(_row())
  x = {k: np.asarray(v[:-1], np.float64) for k, v in row.items()}
  rhos = np.exp(x['log_probs'] - x['behaviour_log_probs'])
  weights = np.minimum(2.0, rhos)
  sums = _sums(row, kind='tis')
  np.testing.assert_allclose(
    sums.pg_loss, -np.sum(weights * x['advantages'] * x['log_probs']), rtol=1e-5
  )
  assert sums.baseline_loss == 0
  np.testing.assert_allclose(
    sums.k3, np.sum(rhos - 1 - np.log(rhos)), rtol=1e-4
  )
  np.testing.assert_allclose(sums.log_rho, np.log(rhos).sum(), rtol=1e-4)
  np.testing.assert_allclose(
    _sums(row, kind='uncorrected').pg_loss,
    -np.sum(x['advantages'] * x['log_probs']),
    rtol=1e-5,
  )


@pytest.mark.parametrize('geometric', [False, True])
def test_given_advantages_weigh_each_turn_by_its_ratio(geometric):
  row = _with_group(_row(length=25, seed=3))
  x = {k: np.asarray(v[:-1], np.float64) for k, v in row.items()}
  log_rhos = x['log_probs'] - x['behaviour_log_probs']
  # Ids come again: a turn is a run of them.
  turns = np.cumsum(np.diff(x['turn_ids'], prepend=x['turn_ids'][0]) != 0)
  sizes = np.bincount(turns)
  of_turn = np.bincount(turns, log_rhos) / (sizes if geometric else 1)
  weights = np.minimum(2.0, np.exp(of_turn[turns]))
  sums = _sums(row, 'turn_geometric' if geometric else 'turn', kind='tis')
  np.testing.assert_allclose(
    sums.pg_loss, -np.sum(weights * x['advantages'] * x['log_probs']), rtol=1e-5
  )


def test_ppo_corrects_from_the_behaviour_to_the_proximal_policy():
  row = _with_group(_row())
  x = {k: np.asarray(v[:-1], np.float64) for k, v in row.items()}
  weights = np.exp(x['proximal_log_probs'] - x['behaviour_log_probs'])
  a = x['advantages']
  r = np.exp(x['log_probs'] - x['proximal_log_probs'])
  loss = np.maximum(-r * a, -np.clip(r, 0.8, 1.28) * a)
  assert weights.max() < 5 and r.max() < 3
  sums = _sums(row, kind='ppo')
  np.testing.assert_allclose(sums.pg_loss, np.sum(weights * loss), rtol=1e-5)
  assert int(sums.clipped_high) == np.sum((r > 1.28) & (a > 0))
  assert int(sums.clipped_low) == np.sum((r < 0.8) & (a < 0))
  # Statistics are of the ratio to who chose the token.
  rhos = np.exp(x['log_probs'] - x['behaviour_log_probs'])
  np.testing.assert_allclose(sums.rho, rhos.sum(), rtol=1e-5)


def test_with_a_critic_values_learn_what_the_behaviour_policy_reached():
  row = _row()
  on_policy = row | {'behaviour_log_probs': row['log_probs']}
  expected = _sums(on_policy).baseline_loss
  for kind in ('tis', 'ppo', 'uncorrected'):
    np.testing.assert_allclose(
      _sums(row, kind=kind).baseline_loss, expected, rtol=1e-5
    )
  assert abs(float(_sums(row).baseline_loss - expected)) > 1e-3


def test_uncorrected_with_a_critic_is_vtrace_on_policy():
  row = _row()
  on_policy = row | {'behaviour_log_probs': row['log_probs']}
  on_policy_sums = _sums(on_policy)
  sums = _sums(row, kind='uncorrected')
  for name in ('pg_loss', 'baseline_loss', 'entropy'):
    np.testing.assert_allclose(
      getattr(on_policy_sums, name), getattr(sums, name), rtol=1e-5
    )
  assert sums.k3 > 0


@pytest.mark.parametrize(
  'kind',
  [
    'ppo',
    *(pytest.param(k, marks=pytest.mark.slow) for k in ('tis', 'uncorrected')),
  ],
)
def test_whatever_lies_outside_of_the_policys_tokens_is_not_read(kind):
  row = _with_group(_row())
  longer = _with_tool_output(row, np.random.default_rng(1))
  for ratio in _RATIOS:
    _assert_equal(_sums(longer, ratio, kind), _sums(row, ratio, kind))


@pytest.mark.parametrize(
  ('ratio', 'kind'), [('token', 'vtrace'), ('turn', 'vtrace'), ('turn', 'ppo')]
)
@pytest.mark.parametrize(
  'axes', [(2, 4), pytest.param((1, 8), marks=pytest.mark.slow)]
)
def test_loss_and_gradients_of_split_rows_equal_whole_rows(ratio, kind, axes):
  data, sequence = axes
  batch = _token_rows(4, 48)
  if kind == 'ppo':
    batch = _with_group(batch)
  split_rows = recurrence.Rows(axis_name=mesh_lib.SEQUENCE)

  def mean_loss(wanted, rest, rows, total):
    sums = _jitted(ratio, rows, kind)(rest | wanted)
    count = total(sums.num_transitions)
    return (sums.pg_loss + 0.5 * sums.baseline_loss) / count, sums

  def shares(wanted, rest):
    everywhere = (mesh_lib.DATA, mesh_lib.SEQUENCE)
    total = functools.partial(jax.lax.psum, axis_name=everywhere)
    (loss, sums), gradients = jax.value_and_grad(mean_loss, has_aux=True)(
      wanted, rest, split_rows, total
    )
    return total(loss), total(sums), gradients

  mesh = mesh_lib.make_mesh(jax.devices(), data=data, sequence=sequence)
  spec = mesh_lib.PartitionSpec(mesh_lib.DATA, mesh_lib.SEQUENCE)
  whole = mesh_lib.replicated_spec()
  wanted = {k: batch.pop(k) for k in _POSITIONAL}
  split = jax.jit(
    mesh_lib.shard_map(
      shares, mesh=mesh, in_specs=spec, out_specs=(whole, whole, spec)
    )
  )(wanted, batch)
  (loss, sums), gradients = jax.jit(
    jax.value_and_grad(
      lambda w, r: mean_loss(w, r, recurrence.WHOLE, lambda x: x), has_aux=True
    )
  )(wanted, batch)
  np.testing.assert_allclose(split[0], loss, rtol=1e-5)
  _assert_equal(split[1], sums)
  for name, gradient in gradients.items():
    np.testing.assert_allclose(
      split[2][name], gradient, rtol=1e-5, atol=1e-7, err_msg=name
    )


def test_computes_in_float32_whatever_the_inputs():
  row = _row()
  half = {
    k: jnp.asarray(v, jnp.bfloat16) if v.dtype == np.float32 else v
    for k, v in row.items()
  }
  full = {
    k: v.astype(jnp.float32) if v.dtype == jnp.bfloat16 else v
    for k, v in half.items()
  }
  sums = _sums(half, 'turn')
  assert all(x.dtype == jnp.float32 for x in sums)
  # The last bit is the compiler's; bfloat16 would be off by 1e-2.
  _assert_equal(sums, _sums(full, 'turn'), rtol=1e-6)


def test_refuses_what_it_cannot_sum():
  row = _row()
  with pytest.raises(
    ValueError, match=r"ratio \('word'\) must be one of token"
  ):
    _sums(row, 'word')
  turn_ids = row.pop('turn_ids')
  with pytest.raises(ValueError, match='needs turn_ids'):
    _sums(row, 'turn')
  with pytest.raises(AssertionError):
    _sums(row | {'turn_ids': turn_ids[1:]}, 'turn')
  with pytest.raises(AssertionError):
    _sums(row | {'rewards': row['rewards'][1:]})
