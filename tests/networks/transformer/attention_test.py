"""Every implementation of attention against the reference, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb.networks.transformer import attention as attention_lib
from tunix_reverb.networks.transformer import blocked_attention
from tunix_reverb.networks.transformer import cudnn_attention
from tunix_reverb.networks.transformer import splash_attention
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import positions

# Three segments that meet inside blocks, one that fills a row, padding alone.
_LENGTHS = {
  256: ((100, 1, 90), (256,), ()),
  40: ((13, 2, 20), (40,), ()),
}
_ONE_DEVICE = (1, 1, 1, 1)


def _mesh(data, fsdp, sequence, tensor):
  size = data * fsdp * sequence * tensor
  return mesh_lib.make_mesh(
    jax.devices()[:size], data=data, fsdp=fsdp, sequence=sequence, tensor=tensor
  )


def _segment_ids(length):
  ids = np.zeros((3, length), np.int32)
  for row, lengths in enumerate(_LENGTHS[length]):
    packed = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    ids[row, : packed.size] = packed
  return ids


def _inputs(length, heads=4, kv_heads=2, size=8, dtype=np.float32):
  rng = np.random.default_rng(length)
  normal = lambda n: rng.normal(size=(3, length, n, size)).astype(dtype)
  return normal(heads), normal(kv_heads), normal(kv_heads), _segment_ids(length)


def _oracle(queries, keys, values, ids):
  """One softmax at a time, float64."""
  outputs = np.zeros(queries.shape)
  group = queries.shape[2] // keys.shape[2]
  for b, i, h in np.ndindex(queries.shape[:3]):
    if not ids[b, i]:
      continue
    seen = [j for j in range(i + 1) if ids[b, j] == ids[b, i]]
    scores = keys[b, seen, h // group].astype(np.float64) @ queries[b, i, h]
    weights = np.exp((scores - scores.max()) / np.sqrt(queries.shape[-1]))
    outputs[b, i, h] = weights / weights.sum() @ values[b, seen, h // group]
  return outputs


def test_reference_is_softmax_over_the_segment_so_far():
  inputs = _inputs(40)
  outputs = attention_lib.reference_attention(*inputs, inputs[3])
  np.testing.assert_allclose(outputs, _oracle(*inputs), rtol=1e-5, atol=1e-5)


def _blocked(*arrays, block):
  return blocked_attention.blocked_attention(*arrays, q_start=0, block=block)


def _in_query_blocks(*arrays, block):
  """The path of cuDNN, with the kernel that runs anywhere."""
  return cudnn_attention.cudnn_attention(
    *arrays, q_start=0, block=block, implementation='xla'
  )


def _splash(*arrays, block):
  mesh = _mesh(*_ONE_DEVICE)
  return splash_attention.splash_attention(*arrays, mesh=mesh, block=block)


def _value_and_gradients(attend, queries, keys, values, ids):
  """Outputs, and gradients of a sum that weights all of them differently."""
  weights = np.cos(np.arange(queries.size)).reshape(queries.shape)

  def total(queries, keys, values):
    outputs = attend(queries, keys, values, ids, ids)
    return jnp.sum(outputs * weights.astype(queries.dtype)), outputs

  gradient = jax.grad(total, argnums=(0, 1, 2), has_aux=True)
  gradients, outputs = jax.jit(gradient)(queries, keys, values)
  return outputs, *gradients


_IMPLEMENTATIONS = {
  'blocked': (functools.partial(_blocked, block=16), 40),
  'blocks_do_not_divide': (functools.partial(_blocked, block=7), 40),
  'cudnn': (functools.partial(_in_query_blocks, block=16), 40),
  'splash': (functools.partial(_splash, block=128), 256),
}


@pytest.mark.parametrize('name', _IMPLEMENTATIONS)
def test_equals_the_reference(name):
  attend, length = _IMPLEMENTATIONS[name]
  size = 64 if name == 'splash' else 8
  inputs = _inputs(length, size=size)
  expected = _value_and_gradients(attention_lib.reference_attention, *inputs)
  actual = _value_and_gradients(attend, *inputs)
  for part, a, e in zip(('outputs', 'q', 'k', 'v'), actual, expected):
    np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5, err_msg=part)
  assert not np.asarray(actual[0])[inputs[3] == 0].any()


@pytest.mark.parametrize('kind,length', [('blocked', 40), ('splash', 256)])
def test_rows_split_over_sequence_equal_whole_rows(kind, length):
  """Queries stay on their device, keys and values are gathered."""
  mesh = _mesh(1, 1, 2, 1)
  inputs = _inputs(length, size=64 if kind == 'splash' else 8)
  attend = attention_lib.Attention(mesh, kind, 128 if kind == 'splash' else 8)

  def split(queries, keys, values, q_ids, kv_ids):
    spec = mesh_lib.PartitionSpec(None, mesh_lib.SEQUENCE)
    return mesh_lib.shard_map(
      lambda q, k, v, ids: attend(
        q,
        *map(positions.row_from_shard, (k, v)),
        ids,
        positions.row_from_shard(ids),
      ),
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
    )(queries, keys, values, q_ids)

  expected = _value_and_gradients(attention_lib.reference_attention, *inputs)
  actual = _value_and_gradients(split, *inputs)
  for part, a, e in zip(('outputs', 'q', 'k', 'v'), actual, expected):
    np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5, err_msg=part)


def test_bfloat16_is_as_close_as_its_rounding():
  inputs = _inputs(40)
  half = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs[:3])
  outputs = jax.jit(functools.partial(_blocked, block=16))(
    *half, inputs[3], inputs[3]
  )
  assert outputs.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    outputs.astype(jnp.float32), _oracle(*inputs), atol=0.03
  )


@pytest.mark.slow  # Compiles long rows.
def test_memory_of_blocks_is_linear_in_the_length():
  def num_bytes(length):
    array = lambda *shape: jax.ShapeDtypeStruct(
      (1, length, *shape), jnp.float32
    )
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, k, v, ids):
      return jnp.sum(_blocked(q, k, v, ids, ids, block=64))

    gradient = jax.grad(total, argnums=(0, 1, 2))
    arrays = (array(2, 8), array(1, 8), array(1, 8), ids)
    compiled = jax.jit(gradient).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  short, long = num_bytes(1024), num_bytes(4096)
  assert long < 4.5 * short
  assert long < 2 * 4096 * 4096  # A quarter of the scores in float32.


def test_keys_of_other_segments_are_not_computed():
  """Bounds of the blocks of keys, for each block of queries."""
  ids = np.repeat([1, 2, 3, 0], [8, 8, 8, 8])[None].astype(np.int32)
  q_ids = ids.reshape(1, 4, 8).swapaxes(0, 1)
  plan = blocked_attention._plan(jnp.asarray(q_ids), jnp.asarray(ids), 0, 4)
  np.testing.assert_array_equal(plan.first[:3], [0, 2, 4])
  np.testing.assert_array_equal(plan.end - plan.first, [2, 2, 2, 0])


def test_decode_is_one_query_against_a_cache():
  queries, keys, values, ids = _inputs(40)
  expected = _oracle(queries, keys, values, ids)
  cached = np.where(np.arange(40) <= 20, ids, 0)
  outputs = attention_lib.reference_attention(
    queries[:, 20:21], keys, values, ids[:, 20:21], cached, q_start=40
  )
  np.testing.assert_allclose(outputs[:, 0], expected[:, 20], atol=1e-5)


@pytest.mark.parametrize(
  'kind,dtype,size,message',
  [
    ('splash', np.float32, 8, r'positions per device \(40\) in multiples'),
    ('cudnn', np.float32, 8, 'bfloat16, not float32'),
    ('cudnn', jnp.bfloat16, 12, r'head_size \(12\)'),
  ],
)
def test_refuses_what_an_implementation_cannot_serve(
  kind, dtype, size, message
):
  inputs = _inputs(40, size=size, dtype=dtype)
  attend = attention_lib.Attention(_mesh(*_ONE_DEVICE), kind, 16)
  with pytest.raises(ValueError, match=message):
    attend(*inputs, inputs[3])
