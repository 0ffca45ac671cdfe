"""V-trace against slow float64 oracles, rlax, and itself in pieces."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from tunix_reverb.ops import recurrence
from tunix_reverb.ops import vtrace
from tunix_reverb.sharding import mesh as mesh_lib

_TOLERANCE = {'rtol': 2e-5, 'atol': 2e-5}


def _random_stream(length, seed=0):
  rng = np.random.default_rng(seed)
  return {
    'values': rng.normal(size=length).astype(np.float32),
    'rewards': rng.normal(size=length).astype(np.float32),
    'discount_t': rng.uniform(0.5, 1, size=length).astype(np.float32),
    'log_rhos': rng.normal(size=length).astype(np.float32),
  }


def _is_transition(lengths, length):
  """bool [length] for segments of T transitions, then padding."""
  mask = np.zeros(length, bool)
  start = 0
  for t in lengths:
    mask[start : start + t] = True
    start += t + 1
  assert start <= length
  return mask


def _oracle(
  values, rewards, discount_t, log_rhos, lengths, rho_bar, c_bar, lambda_
):
  """Remark 1 of Espeholt et al. 2018 as sums of products, in float64."""
  v, r, d, log_rho = (
    np.asarray(x, np.float64) for x in (values, rewards, discount_t, log_rhos)
  )
  rho = np.exp(log_rho)
  vs, advantages = v.copy(), np.zeros_like(v)
  start = 0
  for length in lengths:
    end = start + length  # The position of the bootstrap value.
    for s in range(start, end):
      product = 1.0
      for t in range(s, end):
        delta = min(rho_bar, rho[t]) * (r[t] + d[t] * v[t + 1] - v[t])
        vs[s] += product * delta
        product *= d[t] * lambda_ * min(c_bar, rho[t])
    for s in range(start, end):
      target = lambda_ * vs[s + 1] + (1 - lambda_) * v[s + 1]
      advantages[s] = min(rho_bar, rho[s]) * (r[s] + d[s] * target - v[s])
    start = end + 1
  return vs, advantages


def _decision_oracle(
  values,
  rewards,
  discount_t,
  log_rhos,
  is_transition,
  is_decision,
  **constants,
):
  """One segment without what lies between its decisions, in float64.

  Returns (positions of the decisions, their vs, their advantages).
  """
  v, r, d, log_rho = (
    np.asarray(x, np.float64) for x in (values, rewards, discount_t, log_rhos)
  )
  end = int(np.flatnonzero(is_transition)[-1]) + 1
  decisions = [t for t in range(end) if is_decision[t]]
  reward, discount = [], []
  for t, following in zip(decisions, [*decisions[1:], end]):
    total, product = 0.0, 1.0
    for u in range(t, following):
      total += product * r[u]
      product *= d[u]
    reward.append(total)
    discount.append(product)
  vs, advantages = _oracle(
    v[[*decisions, end]],
    np.array([*reward, 0.0]),
    np.array([*discount, 0.0]),
    log_rho[[*decisions, end]],
    lengths=(len(decisions),),
    **constants,
  )
  return decisions, vs[:-1], advantages[:-1]


@pytest.mark.parametrize('lambda_', [0.0, 0.9, 1.0])
@pytest.mark.parametrize('rho_bar,c_bar', [(1.0, 1.0), (2.0, 0.5)])
def test_matches_float64_oracle(rho_bar, c_bar, lambda_):
  lengths, length = (7, 1, 12, 3), 30
  stream = _random_stream(length)
  output = vtrace.vtrace(
    **stream,
    is_transition=_is_transition(lengths, length),
    rho_bar=rho_bar,
    c_bar=c_bar,
    lambda_=lambda_,
  )
  vs, advantages = _oracle(
    **stream, lengths=lengths, rho_bar=rho_bar, c_bar=c_bar, lambda_=lambda_
  )
  np.testing.assert_allclose(output.vs, vs, **_TOLERANCE)
  np.testing.assert_allclose(output.pg_advantages, advantages, **_TOLERANCE)
  np.testing.assert_allclose(output.errors, vs - stream['values'], **_TOLERANCE)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  lengths=st.lists(st.integers(0, 6), max_size=4),
  lambda_=st.floats(0, 1),
  rho_bar=st.floats(0.1, 5),
  c_bar=st.floats(0, 5),
  seed=st.integers(0, 2**16),
)
def test_any_row_matches_float64_oracle(lengths, lambda_, rho_bar, c_bar, seed):
  length = 28  # One shape: the property runs without recompiling.
  stream = _random_stream(length, seed)
  output = _jitted(
    **stream,
    is_transition=_is_transition(lengths, length),
    rho_bar=rho_bar,
    c_bar=c_bar,
    lambda_=lambda_,
  )
  vs, advantages = _oracle(
    **stream, lengths=lengths, rho_bar=rho_bar, c_bar=c_bar, lambda_=lambda_
  )
  np.testing.assert_allclose(output.vs, vs, rtol=1e-3, atol=1e-3)
  np.testing.assert_allclose(
    output.pg_advantages, advantages, rtol=1e-3, atol=1e-3
  )


_jitted = jax.jit(vtrace.vtrace)


@pytest.mark.parametrize('lambda_', [0.5, 0.95, 1.0])
@pytest.mark.parametrize('rho_bar', [1.0, 3.0])
def test_single_segment_matches_rlax(rho_bar, lambda_):
  length = 21
  stream = _random_stream(length)
  ours = vtrace.vtrace(
    **stream,
    is_transition=_is_transition((length - 1,), length),
    rho_bar=rho_bar,
    lambda_=lambda_,
  )
  arguments = (
    stream['values'][:-1],
    stream['values'][1:],
    stream['rewards'][:-1],
    stream['discount_t'][:-1],
    np.exp(stream['log_rhos'][:-1]),
  )
  with jax.numpy_dtype_promotion('standard'):
    theirs = rlax.vtrace_td_error_and_advantage(
      *arguments,
      lambda_=lambda_,
      clip_rho_threshold=rho_bar,
      clip_pg_rho_threshold=rho_bar,
    )
    errors = rlax.vtrace(*arguments, lambda_, rho_bar)
  np.testing.assert_allclose(ours.errors[:-1], theirs.errors, **_TOLERANCE)
  np.testing.assert_allclose(ours.errors[:-1], errors, **_TOLERANCE)
  np.testing.assert_allclose(
    ours.pg_advantages[:-1], theirs.pg_advantage, **_TOLERANCE
  )


@pytest.mark.parametrize('form', ['scan', 'associative'])
@pytest.mark.parametrize('rows,length', [(32, 1024), (2, 16384)])
def test_long_rows_match_rlax_and_float64(rows, length, form):
  """Both forms, at the lengths of token rows, without a discount."""
  streams = [_random_stream(length, seed) for seed in range(rows)]
  batch = {k: np.stack([s[k] for s in streams]) for k in streams[0]}
  batch['log_rhos'] *= np.float32(0.1)
  batch['discount_t'] = np.ones_like(batch['discount_t'])
  mask = np.tile(_is_transition((length - 1,), length), (rows, 1))
  ours = jax.jit(
    functools.partial(vtrace.vtrace, rows=recurrence.Rows(form=form))
  )(**batch, is_transition=mask)
  v, r, log_rho = (
    batch[k].astype(np.float64) for k in ('values', 'rewards', 'log_rhos')
  )
  clipped = np.minimum(1.0, np.exp(log_rho))
  errors = np.zeros_like(v)
  for t in reversed(range(length - 1)):
    delta = clipped[:, t] * (r[:, t] + v[:, t + 1] - v[:, t])
    errors[:, t] = delta + clipped[:, t] * errors[:, t + 1]
  scale = np.abs(errors).max()
  assert np.abs(ours.errors - errors).max() < 5e-6 * scale
  with jax.numpy_dtype_promotion('standard'):
    theirs = jax.jit(jax.vmap(rlax.vtrace))(
      batch['values'][:, :-1],
      batch['values'][:, 1:],
      batch['rewards'][:, :-1],
      batch['discount_t'][:, :-1],
      np.exp(batch['log_rhos'][:, :-1]),
    )
  assert np.abs(ours.errors[:, :-1] - theirs).max() < 1e-5 * scale


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  decisions=st.lists(st.booleans(), min_size=19, max_size=19),
  length=st.integers(1, 19),
  lambda_=st.floats(0, 1),
  rho_bar=st.floats(0.1, 5),
  c_bar=st.floats(0, 5),
  seed=st.integers(0, 2**16),
)
def test_what_lies_between_decisions_is_as_if_left_out(
  decisions, length, lambda_, rho_bar, c_bar, seed
):
  is_decision = np.array([*decisions, True])
  is_decision[length - 1] = True  # There is at least one.
  stream = _random_stream(20, seed)
  # No loss trains these values: whatever they are, they must not count.
  stream['values'][:length] = np.where(
    is_decision[:length], stream['values'][:length], np.nan
  )
  constants = {'rho_bar': rho_bar, 'c_bar': c_bar, 'lambda_': lambda_}
  masks = {
    'is_transition': _is_transition((length,), 20),
    'is_decision': is_decision,
  }
  output = _jitted(**stream, **masks, **constants)
  positions, vs, advantages = _decision_oracle(**stream, **masks, **constants)
  at = lambda x: np.asarray(x)[positions]
  np.testing.assert_allclose(at(output.vs), vs, rtol=1e-3, atol=1e-3)
  np.testing.assert_allclose(
    at(output.pg_advantages), advantages, rtol=1e-3, atol=1e-3
  )


def test_deciding_everywhere_is_plain_vtrace():
  stream = _random_stream(30)
  mask = _is_transition((7, 1, 12, 3), 30)
  constants = {'rho_bar': 2.0, 'c_bar': 0.7, 'lambda_': 0.9}
  plain = _jitted(**stream, is_transition=mask, **constants)
  decided = _jitted(
    **stream, is_transition=mask, is_decision=np.ones(30, bool), **constants
  )
  for name in plain._fields:
    np.testing.assert_allclose(
      getattr(decided, name), getattr(plain, name), rtol=1e-6, atol=1e-6
    )


def _packed_rows(length, seed=0):
  """Two rows of segments, some across every border of eight devices."""
  rng = np.random.default_rng(seed)
  ids = np.stack(
    [
      np.repeat([1, 2, 3, 0], [length // 2, 3, length // 4, length // 4 - 3]),
      np.repeat([1, 2], [5, length - 5]),
    ]
  ).astype(np.int32)
  streams = [_random_stream(length, seed + i) for i in range(2)]
  batch = {k: np.stack([s[k] for s in streams]) for k in streams[0]}
  return batch, ids, rng.random(ids.shape) < 0.4


@pytest.mark.parametrize('devices', [2, 8])
@pytest.mark.parametrize('decides_everywhere', [True, False])
def test_rows_split_over_devices_equal_whole_rows(devices, decides_everywhere):
  batch, ids, is_decision = _packed_rows(64)

  def run(rows, batch, ids, is_decision):
    return vtrace.vtrace(
      **batch,
      is_transition=vtrace.transition_mask(ids, rows),
      is_decision=None if decides_everywhere else is_decision,
      lambda_=0.9,
      rows=rows,
    )

  mesh = mesh_lib.make_mesh(jax.devices()[:devices], data=1, sequence=devices)
  spec = mesh_lib.PartitionSpec(None, mesh_lib.SEQUENCE)
  split = jax.jit(
    mesh_lib.shard_map(
      functools.partial(run, recurrence.Rows(axis_name=mesh_lib.SEQUENCE)),
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
    )
  )(batch, ids, is_decision)
  whole = jax.jit(functools.partial(run, recurrence.WHOLE))(
    batch, ids, is_decision
  )
  for name in whole._fields:
    np.testing.assert_allclose(
      getattr(split, name),
      getattr(whole, name),
      rtol=1e-5,
      atol=1e-5,
      err_msg=name,
    )


def test_two_segments_equal_two_traces():
  stream = _random_stream(17)
  both = vtrace.vtrace(
    **stream, is_transition=_is_transition((9, 6), 17), lambda_=0.9
  )
  slices = (slice(0, 10), slice(10, 17))
  parts = [
    vtrace.vtrace(
      **{k: v[s] for k, v in stream.items()},
      is_transition=_is_transition((s.stop - s.start - 1,), s.stop - s.start),
      lambda_=0.9,
    )
    for s in slices
  ]
  for name in both._fields:
    np.testing.assert_allclose(
      getattr(both, name),
      np.concatenate([getattr(p, name) for p in parts]),
      rtol=1e-6,
      atol=1e-6,
      err_msg=name,
    )


def test_neighbouring_segment_does_not_leak():
  mask = _is_transition((4, 4), 10)
  stream = _random_stream(10)
  before = vtrace.vtrace(**stream, is_transition=mask)
  for name in ('values', 'rewards', 'log_rhos'):
    stream[name] = np.where(np.arange(10) >= 5, 77.0, stream[name]).astype(
      np.float32
    )
  after = vtrace.vtrace(**stream, is_transition=mask)
  np.testing.assert_array_equal(before.vs[:5], after.vs[:5])
  np.testing.assert_array_equal(
    before.pg_advantages[:5], after.pg_advantages[:5]
  )


@pytest.mark.parametrize('last_discount,expected', [(0.0, 3.0), (1.0, 103.0)])
def test_truncation_bootstraps_and_termination_does_not(
  last_discount, expected
):
  output = vtrace.vtrace(
    values=np.array([0, 0, 0, 100], np.float32),
    rewards=np.array([1, 1, 1, 50], np.float32),
    discount_t=np.array([1, 1, last_discount, 1], np.float32),
    log_rhos=np.zeros(4, np.float32),
    is_transition=np.array([True, True, True, False]),
  )
  assert output.vs[0] == expected
  assert output.pg_advantages[0] == expected
  assert output.vs[3] == 100


def test_on_policy_identity_is_the_n_step_return():
  output = vtrace.vtrace(
    values=np.array([5, -3, 2], np.float32),
    rewards=np.array([1, 10, 0], np.float32),
    discount_t=np.full(3, 0.5, np.float32),
    log_rhos=np.zeros(3, np.float32),
    is_transition=np.array([True, True, False]),
  )
  np.testing.assert_allclose(output.vs, [1 + 0.5 * 10 + 0.25 * 2, 11, 2])


def test_whatever_lies_on_padding_stays_there():
  stream = {
    k: np.full(6, np.nan, np.float32)
    for k in ('rewards', 'discount_t', 'log_rhos')
  }
  for x in stream.values():
    x[:3] = 0.5
  stream['values'] = np.array([1, 2, 3, 4, np.inf, np.nan], np.float32)
  output = vtrace.vtrace(**stream, is_transition=_is_transition((3,), 6))
  assert np.isfinite(output.vs[:4]).all()
  assert output.vs[3] == 4
  assert np.isfinite(output.pg_advantages).all()
  np.testing.assert_array_equal(output.pg_advantages[3:], 0)


def test_extreme_log_ratios_stay_finite():
  stream = _random_stream(5)
  stream['log_rhos'] = np.array([1e4, -1e4, 300, -300, 0], np.float32)
  output = vtrace.vtrace(**stream, is_transition=_is_transition((4,), 5))
  for x in output:
    assert np.isfinite(x).all()


def test_computes_in_float32_whatever_the_inputs():
  stream = _random_stream(9)
  half = {k: jnp.asarray(v, jnp.bfloat16) for k, v in stream.items()}
  mask = _is_transition((8,), 9)
  output = vtrace.vtrace(**half, is_transition=mask)
  full = {k: v.astype(jnp.float32) for k, v in half.items()}
  assert output.vs.dtype == jnp.float32
  np.testing.assert_array_equal(
    output.vs, vtrace.vtrace(**full, is_transition=mask).vs
  )


def test_no_gradient_flows_through_targets():
  stream = _random_stream(5)
  fn = functools.partial(vtrace.vtrace, is_transition=_is_transition((4,), 5))
  gradients = jax.grad(lambda s: sum(jnp.sum(x) for x in fn(**s)))(
    {k: jnp.asarray(v) for k, v in stream.items()}
  )
  for g in gradients.values():
    np.testing.assert_array_equal(g, 0)


def test_transition_mask():
  np.testing.assert_array_equal(
    vtrace.transition_mask(jnp.array([1, 1, 1, 2, 2, 3, 0, 0])),
    [True, True, False, True, False, False, False, False],
  )


def test_refuses_wrong_shapes():
  stream = _random_stream(5)
  with pytest.raises(AssertionError):
    vtrace.vtrace(**stream, is_transition=np.zeros(4, bool))
