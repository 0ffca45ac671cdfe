"""Packing: what goes in comes out, once, where the segment facts say."""

from dm_env import specs as dm_specs
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tree

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.batching import buckets as buckets_lib
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.batching import placement

_SPEC = specs.EnvironmentSpec(
  observation={
    'id': dm_specs.Array((), np.int32),
    'x': dm_specs.Array((2, 3), np.float32),
  },
  action=dm_specs.DiscreteArray(5),
  reward=dm_specs.Array((), np.float32),
  discount=dm_specs.BoundedArray((), np.float32, 0, 1),
)
_CORE = (dm_specs.Array((4,), np.float32),)
_COLUMNS = specs.trajectories_spec(_SPEC, _CORE)


def _item(lengths, first_id=0, version=3, created_at_s=0.0, permit_id=0):
  """An item whose every value is derived from a global timestep id."""
  lengths = np.asarray(lengths, np.int32)
  n, s = lengths.size, int(lengths.sum())
  timestep = first_id + np.arange(s + n, dtype=np.int32)
  last = np.cumsum(lengths + 1) - 1
  transition = np.delete(timestep, last)
  return types.Trajectories(
    observation={
      'id': timestep,
      'x': np.tile(timestep[:, None, None], (1, 2, 3)).astype(np.float32),
    },
    action=(transition % 5).astype(np.uint8),
    reward=transition.astype(np.float32),
    discount=np.ones(s, np.float32),
    behaviour_log_prob=-transition.astype(np.float32),
    policy_version=np.full(s, version, np.int32),
    loss_mask=np.ones(s, np.bool_),
    core_state=(
      np.tile(timestep[last - lengths][:, None], (1, 4)).astype(np.float32),
    ),
    lengths=lengths,
    created_at_s=np.full(n, created_at_s),
    actor_id=np.zeros(n, np.int32),
    episode_id=np.arange(n, dtype=np.int64),
    truncated=np.zeros(n, np.bool_),
    permit_id=permit_id + np.arange(n, dtype=np.int64),
  )


def _packer(lengths=(16,), rows_positions=64, window=1.0, **kwargs):
  return packer_lib.Packer(
    buckets=buckets_lib.make_buckets(lengths, batch_positions=rows_positions),
    columns=_COLUMNS,
    window=window,
    **kwargs,
  )


def _check(packed):
  """Checks a batch against itself; returns the timestep ids it holds."""
  batch, segments = packed.batch, packed.segments
  rows, length = batch.segment_ids.shape
  assert length == packed.bucket
  seen = []
  used = np.zeros((rows, length), bool)
  for i in range(segments.length.size):
    row, start, size = (
      int(segments.row[i]),
      int(segments.start[i]),
      int(segments.length[i]),
    )
    at = (row, slice(start, start + size + 1))
    assert not used[at].any(), 'segments overlap'
    used[at] = True
    ids = batch.observation['id'][at]
    np.testing.assert_array_equal(ids, ids[0] + np.arange(size + 1))
    np.testing.assert_array_equal(batch.observation['x'][at][:, 1, 2], ids)
    np.testing.assert_array_equal(
      batch.segment_positions[at], np.arange(size + 1)
    )
    assert len(set(batch.segment_ids[at].tolist())) == 1
    steps = (row, slice(start, start + size))
    np.testing.assert_array_equal(batch.reward[steps], ids[:-1])
    np.testing.assert_array_equal(batch.action[steps], ids[:-1] % 5)
    np.testing.assert_array_equal(batch.behaviour_log_prob[steps], -ids[:-1])
    assert batch.loss_mask[steps].all()
    assert not batch.loss_mask[row, start + size]
    segment = batch.segment_ids[row, start] - 1
    np.testing.assert_array_equal(batch.core_state[0][row, segment], ids[0])
    seen.extend(ids.tolist())
  assert not batch.segment_ids[~used].any()
  assert not batch.loss_mask[~used].any()
  for row in batch.segment_ids:
    ids = row[row > 0]
    assert (np.diff(ids) >= 0).all(), 'segment ids ascend within a row'
    assert set(ids) == set(range(1, len(set(ids)) + 1))
  return seen


def test_turns_go_with_their_transitions():
  columns = specs.trajectories_spec(_SPEC, _CORE, has_turns=True)
  packer = packer_lib.Packer(
    buckets=buckets_lib.make_buckets((8,), batch_positions=8),
    columns=columns,
    window=1.0,
  )
  item = _item([3, 2])._replace(turn_id=np.array([1, 1, 2, 5, 6], np.int32))
  packer.add(item)
  batch = packer.pop(flush=True).batch
  assert batch.turn_id.dtype == np.int32
  assert batch.turn_id.tolist() == [[1, 1, 2, 0, 5, 6, 0, 0]]
  bucket = buckets_lib.Bucket(8, 2)
  assert packer_lib.empty_batch(bucket, columns).turn_id.shape == (2, 8)
  assert packer_lib.empty_batch(bucket, _COLUMNS).turn_id == ()


def test_advantages_go_with_their_transitions():
  columns = specs.trajectories_spec(_SPEC, _CORE, has_advantage=True)
  packer = packer_lib.Packer(
    buckets=buckets_lib.make_buckets((8,), batch_positions=8),
    columns=columns,
    window=1.0,
  )
  advantage = np.array([1.5, 1.5, 1.5, -0.5, -0.5], np.float32)
  packer.add(_item([3, 2])._replace(advantage=advantage))
  batch = packer.pop(flush=True).batch
  assert batch.advantage.dtype == np.float32
  assert batch.advantage.tolist() == [[1.5, 1.5, 1.5, 0, -0.5, -0.5, 0, 0]]
  bucket = buckets_lib.Bucket(8, 2)
  assert packer_lib.empty_batch(bucket, columns).advantage.shape == (2, 8)
  assert packer_lib.empty_batch(bucket, _COLUMNS).advantage == ()


@settings(deadline=None, max_examples=60)
@given(
  st.lists(
    st.lists(st.integers(1, 31), min_size=1, max_size=6),
    min_size=1,
    max_size=30,
  )
)
def test_every_trajectory_comes_out_once(items):
  packer = _packer(lengths=(8, 16, 32), rows_positions=64)
  first_id = 0
  seen = []
  for lengths in items:
    packer.add(_item(lengths, first_id))
    first_id += sum(lengths) + len(lengths)
    while (packed := packer.pop()) is not None:
      seen += _check(packed)
  while (packed := packer.pop(flush=True)) is not None:
    seen += _check(packed)
  assert sorted(seen) == list(range(first_id))
  assert packer.pending_positions == 0
  assert packer.oldest_created_at_s() is None


def test_shapes_are_the_buckets():
  packer = _packer(lengths=(8, 16), rows_positions=32)
  packer.add(_item([3] * 20))
  packed = packer.pop()
  assert packed.batch.segment_ids.shape == (4, 8)
  assert packed.batch.core_state[0].shape == (4, 4, 4)
  for bucket in buckets_lib.make_buckets((8, 16), batch_positions=32):
    empty = packer_lib.empty_batch(bucket, _COLUMNS)
    shapes = tree.map_structure(lambda a: (a.shape, a.dtype), empty)
    assert shapes.observation['x'] == (
      (bucket.rows, bucket.length, 2, 3),
      np.float32,
    )
    if bucket.length == packed.bucket:
      assert shapes == tree.map_structure(
        lambda a: (a.shape, a.dtype), packed.batch
      )


def test_waits_for_a_full_window_unless_flushed():
  packer = _packer(lengths=(16,), rows_positions=32, window=1.5)
  packer.add(_item([7] * 5))
  assert packer.pending_positions == 40
  assert packer.pop() is None
  packer.add(_item([7], first_id=40))
  packed = packer.pop()
  assert packed is not None
  assert packer_lib.fill(packed) == 1.0
  assert packer.pop() is None
  left = packer.pop(flush=True)
  assert left.segments.length.tolist() == [7, 7]
  assert packer.pop(flush=True) is None


def test_what_a_batch_left_behind_goes_first_into_the_next():
  packer = _packer(lengths=(10,), rows_positions=10)
  packer.add(_item([1], first_id=0, created_at_s=1.0))
  packer.add(_item([9], first_id=2, created_at_s=2.0))
  first = packer.pop()
  # First-fit decreasing prefers the long one; the short one waits once only.
  assert first.segments.length.tolist() == [9]
  assert packer.oldest_created_at_s() == 1.0
  packer.add(_item([9], first_id=12))
  second = packer.pop()
  assert second.segments.length.tolist() == [1]


def test_keep_drops_the_others():
  packer = _packer()
  packer.add(_item([3, 4, 5]), keep=np.array([True, False, True]))
  packed = packer.pop(flush=True)
  assert sorted(packed.segments.length.tolist()) == [3, 5]
  _check(packed)
  packer.add(_item([3]), keep=np.array([False]))
  assert packer.pop(flush=True) is None


def test_a_trajectory_longer_than_every_bucket_is_refused():
  with pytest.raises(ValueError, match=r'positions \(18\) must be <= .*16'):
    _packer().add(_item([17]))


def test_segment_facts():
  packer = _packer()
  packer.add(_item([3, 4], version=7, created_at_s=12.5))
  segments = packer.pop(flush=True).segments
  assert segments.policy_version.tolist() == [7, 7]
  assert segments.created_at_s.tolist() == [12.5, 12.5]


def test_minimum_versions_per_trajectory():
  item = _item([2, 3])
  item = item._replace(policy_version=np.array([5, 4, 9, 8, 7], np.int32))
  assert packer_lib.minimum_versions(item).tolist() == [4, 7]


@pytest.mark.parametrize(
  ('lengths', 'window'), [((256,), 1.1), ((64, 128, 256), 1.25)]
)
def test_fill_on_a_log_normal_mix(lengths, window):
  """Fill >= 95% with a window of about one batch."""
  rng = np.random.default_rng(0)
  packer = _packer(lengths=lengths, rows_positions=2048, window=window)
  fills = []
  while len(fills) < 100:
    mix = np.clip(rng.lognormal(3.0, 1.0, size=8), 1, 255).astype(int)
    packer.add(_item(mix))
    while (packed := packer.pop()) is not None:
      fills.append(packer_lib.fill(packed))
  assert np.mean(fills) >= 0.95
  assert np.min(fills) >= 0.90


def _tokens(positions, batches_before):
  """An item of token trajectories that says when it came, in batches."""
  lengths = np.asarray(positions, np.int32) - 1
  n, s = lengths.size, int(lengths.sum())
  zeros = lambda dtype, size=s: np.zeros(size, dtype)
  return types.Trajectories(
    observation=zeros(np.uint16, s + n),
    action=zeros(np.uint16),
    reward=zeros(np.float32),
    discount=zeros(np.float32),
    behaviour_log_prob=zeros(np.float32),
    policy_version=np.full(s, batches_before, np.int32),
    loss_mask=np.ones(s, np.bool_),
    core_state=(),
    lengths=lengths,
    created_at_s=zeros(np.float64, n),
    actor_id=zeros(np.int32, n),
    episode_id=zeros(np.int64, n),
    truncated=zeros(np.bool_, n),
    permit_id=zeros(np.int64, n),
    turn_id=zeros(np.int32),
  )


def _pack_heavy_tail(num_batches, *, num_shards, **kwargs):
  """Batches of 16..4096 tokens a trajectory, median 256, 4 in an item."""
  spec = dm_specs.BoundedArray((), np.uint16, 0, 31_999)
  columns = specs.trajectories_spec(
    _SPEC._replace(observation=spec, action=spec), has_turns=True
  )
  packer = packer_lib.Packer(
    columns=columns, window=1.25, num_shards=num_shards, **kwargs
  )
  rng = np.random.default_rng(0)
  batches = []
  while len(batches) < num_batches:
    drawn = np.rint(rng.lognormal(np.log(256), 1.2, 4))
    packer.add(_tokens(np.clip(drawn, 16, 4096), len(batches)))
    packed = packer.pop()
    if packed is not None:
      batches.append(packed)
  return batches


@pytest.mark.parametrize('lengths', [(4096,), (512, 1024, 4096)])
def test_fill_on_a_heavy_tailed_mix_of_tokens(lengths):
  """Fill >= 97%, and nothing waits for more than two batches."""
  batches = _pack_heavy_tail(
    40,
    num_shards=4,
    buckets=buckets_lib.make_buckets(
      lengths, batch_positions=32_768, row_multiple=4
    ),
  )
  fills = [packer_lib.fill(packed) for packed in batches]
  assert np.mean(fills) >= 0.97
  assert min(fills) >= 0.95
  waits = [i - p.segments.policy_version.min() for i, p in enumerate(batches)]
  assert max(waits) <= 2


def _worst_to_mean(batches, num_shards):
  """Attention cost of the worst shard in shares of the mean, over batches."""
  ratios = []
  for packed in batches:
    # From what the learner gets, not from what the packer thinks.
    ids = packed.batch.segment_ids
    cost = [
      sum(int((row == i).sum()) ** 2 for i in range(1, row.max() + 1))
      for row in ids
    ]
    shards = np.reshape(cost, (num_shards, -1)).sum(axis=1)
    ratios.append(shards.max() / shards.mean())
  return float(np.mean(ratios))


def test_attention_costs_the_shards_about_the_same():
  buckets = buckets_lib.make_buckets((4096,), batch_positions=131_072)
  uneven = _pack_heavy_tail(8, num_shards=1, buckets=buckets)
  even = _pack_heavy_tail(8, num_shards=8, buckets=buckets)
  assert _worst_to_mean(uneven, 8) > 1.8
  assert _worst_to_mean(even, 8) < 1.1
  # The same trajectories are in the same batches.
  for ours, theirs in zip(even, uneven):
    assert sorted(ours.segments.length) == sorted(theirs.segments.length)


@given(
  st.lists(st.integers(0, 50), min_size=12, max_size=12),
  st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_even_rows_is_a_permutation_with_the_costliest_first(cost, num_shards):
  cost = np.array(cost, np.float64)
  place = placement.even_rows(cost, num_shards)
  assert sorted(place) == list(range(12))
  if 1 < num_shards < 12:
    dealt = np.empty(12)
    dealt[place] = cost
    for shard in dealt.reshape(num_shards, -1):
      assert (np.diff(shard) <= 0).all()
    assert (
      dealt.reshape(num_shards, -1).sum(axis=1).max()
      <= cost.sum() / num_shards + cost.max()
    )


def test_rows_change_places_with_all_they_hold():
  packer = _packer(lengths=(32,), rows_positions=256, num_shards=4)
  packer.add(_item([31, 30, 20, 9, 15, 15, 3, 3, 3, 3, 7, 7, 7, 7]))
  packed = packer.pop(flush=True)
  assert len(_check(packed)) == 174
  # The two longest are on different shards.
  longest = packed.segments.row[packed.segments.length >= 30]
  assert len(set(longest // 2)) == 2


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 8))
def test_placement_is_first_fit_decreasing(positions, num_rows):
  positions = np.array(positions, np.int32)
  row, start = placement.Rows(rows=num_rows, length=20).place(positions)
  # The textbook algorithm, one trajectory at a time.
  used = [0] * num_rows
  for i in np.argsort(-positions, kind='stable'):
    fits = [r for r in range(num_rows) if used[r] + positions[i] <= 20]
    expected = fits[0] if fits else -1
    assert row[i] == expected
    if fits:
      assert start[i] == used[expected]
      used[expected] += positions[i]


def test_buckets_round_rows_up_to_the_devices():
  assert buckets_lib.make_buckets(
    (10, 40), batch_positions=100, row_multiple=8
  ) == (buckets_lib.Bucket(10, 16), buckets_lib.Bucket(40, 8))


@settings(deadline=None, max_examples=60)
@given(
  lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
  order=st.randoms(use_true_random=False),
)
def test_by_number_a_batch_does_not_depend_on_the_order_of_arrival(
  lengths, order
):
  ids = np.cumsum([0, *(n + 1 for n in lengths)])
  items = [
    _item([n], first_id=int(ids[i]), permit_id=100 + i)
    for i, n in enumerate(lengths)
  ]
  batches = []
  for _ in range(2):
    packer = _packer(lengths=(16, 32), max_trajectories=5)
    for item in items:
      packer.add(item)
    taken = []
    while (packed := packer.pop(flush=True)) is not None:
      _check(packed)
      taken.append(packed)
    batches.append(taken)
    order.shuffle(items)
  for ours, theirs in zip(*batches, strict=True):
    tree.map_structure(np.testing.assert_array_equal, ours.batch, theirs.batch)
  sizes = [packed.segments.length.size for packed in batches[0]]
  assert sizes == [5] * (len(lengths) // 5) + [len(lengths) % 5] * (
    len(lengths) % 5 > 0
  )
  came = [p for packed in batches[0] for p in sorted(packed.segments.permit_id)]
  assert came == [100 + i for i in range(len(lengths))]


def test_by_number_a_batch_is_ready_when_there_are_as_many():
  packer = _packer(max_trajectories=3)
  packer.add(_item([2, 2]))
  assert not packer.is_ready and packer.pop() is None
  packer.add(_item([2, 2], first_id=100, permit_id=2))
  assert packer.is_ready
  assert sorted(packer.pop().segments.permit_id) == [0, 1, 2]
  assert packer.pop() is None
  assert packer.pop(flush=True).segments.permit_id.tolist() == [3]


def test_by_number_what_fits_no_batch_goes_by_age():
  # One row of 16, and an older trajectory that longer ones would displace.
  packer = _packer(rows_positions=16, max_trajectories=4)
  packer.add(_item([3], permit_id=1))
  packer.add(_item([9], first_id=50, permit_id=2))
  packer.add(_item([7], first_id=100, permit_id=3))
  packer.add(_item([1], first_id=150, permit_id=4))
  assert sorted(packer.pop().segments.permit_id) == [1, 2, 4]
  assert packer.pop(flush=True).segments.permit_id.tolist() == [3]


def _group(size, permit_id):
  """An item of `size` trajectories under its first one's permit."""
  item = _item([2] * size, first_id=1000 * permit_id, permit_id=permit_id)
  permits = np.zeros(size, np.int64)
  permits[0] = permit_id
  return item._replace(permit_id=permits)


def test_by_number_groups_go_whole_in_the_order_of_their_permits():
  packer = _packer(max_trajectories=8)
  # Members have left the second and the third.
  for size, permit_id in ((4, 7), (3, 6), (3, 8), (4, 5)):
    packer.add(_group(size, permit_id))
  took = []
  while (packed := packer.pop(flush=True)) is not None:
    permits = packed.segments.permit_id
    took.append((permits.size, sorted(permits[permits > 0].tolist())))
  assert took == [(7, [5, 6]), (7, [7, 8])]


def test_by_number_a_group_larger_than_a_batch_is_cut():
  packer = _packer(max_trajectories=2)
  packer.add(_group(3, 5))
  sizes = [packer.pop(flush=True).segments.length.size for _ in range(2)]
  assert sizes == [2, 1]
