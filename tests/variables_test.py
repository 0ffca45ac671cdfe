"""Variables as bytes and files."""

import collections
import os

import hypothesis
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest

from tunix_reverb import types
from tunix_reverb import variables
from tunix_reverb.replay import test_utils

_DTYPES = [
  np.dtype(name)
  for name in ('float32', 'float16', 'float64', 'int8', 'uint16', 'int64')
] + [np.dtype(bool), np.dtype(ml_dtypes.bfloat16)]


def _round_trip(params, version=1):
  buffer = variables.encode(types.Variables(version, params))
  assert buffer.dtype == np.uint8 and buffer.ndim == 1
  return variables.decode(buffer)


@st.composite
def _arrays(draw):
  dtype = draw(st.sampled_from(_DTYPES))
  shape = draw(st.lists(st.integers(0, 3), max_size=3))
  size = int(np.prod(shape)) * dtype.itemsize
  raw = draw(st.binary(min_size=size, max_size=size))
  if dtype.kind == 'b':
    raw = bytes(b & 1 for b in raw)
  return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)


_PARAMS = st.recursive(
  st.one_of(_arrays(), st.none()),
  lambda inner: st.one_of(
    st.dictionaries(st.text(max_size=5), inner, max_size=3),
    st.lists(inner, max_size=3),
    st.lists(inner, max_size=3).map(tuple),
  ),
  max_leaves=8,
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(params=_PARAMS, version=st.integers(0, 2**40))
def test_any_params_come_back_bit_for_bit(params, version):
  received = _round_trip(params, version)
  assert received.policy_version == version
  test_utils.assert_trees_equal(received.params, params)


def test_decoded_leaves_are_aligned_read_only_views():
  params = {'a': np.ones(3, np.int8), 'b': np.arange(5.0), 'c': np.float32(2)}
  buffer = variables.encode(types.Variables(1, params))
  received = variables.decode(buffer).params
  for leaf in received.values():
    assert np.shares_memory(leaf, buffer)
    assert not leaf.flags.writeable
  assert received['c'].shape == ()
  start = received['a'].ctypes.data
  assert (received['b'].ctypes.data - start) % 64 == 0


def test_leaves_in_any_memory_layout_are_sent_in_c_order():
  array = np.arange(12, dtype=np.float32).reshape(3, 4)
  params = {'fortran': np.asfortranarray(array), 'strided': array[:, ::2]}
  received = _round_trip(params).params
  np.testing.assert_array_equal(received['fortran'], array)
  np.testing.assert_array_equal(received['strided'], array[:, ::2])


def test_jax_arrays_are_sent_as_they_are():
  import jax.numpy as jnp

  received = _round_trip({'w': jnp.ones((2, 2), jnp.bfloat16)}).params
  assert received['w'].dtype == ml_dtypes.bfloat16


_Pair = collections.namedtuple('_Pair', 'a b')


@pytest.mark.parametrize(
  ('params', 'message'),
  [
    ({'x': {1: np.ones(2)}}, 'params/x must have string keys'),
    ({'x': [_Pair(1, 2)]}, 'params/x/0 is a _Pair'),
    ({'x': np.array(['text'])}, 'params/x has dtype <U4'),
    ({'x': np.array([object()])}, 'params/x has dtype object'),
  ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(params, message):
  with pytest.raises(TypeError) as raised:
    variables.encode(types.Variables(1, params))
  assert message in str(raised.value)


@pytest.mark.parametrize('damage', ['empty', 'text', 'cut', 'header'])
def test_other_bytes_are_refused(damage):
  buffer = variables.encode(types.Variables(1, {'w': np.ones(100)}))
  if damage == 'empty':
    buffer = buffer[:0]
  elif damage == 'text':
    buffer = np.frombuffer(b'something else altogether', np.uint8)
  elif damage == 'cut':
    buffer = buffer[:-64]
  else:
    buffer[16] = ord('?')
  with pytest.raises(ValueError, match='must be encoded variables'):
    variables.decode(buffer)


def test_padding_after_the_end_is_ignored():
  buffer = variables.encode(types.Variables(3, {'w': np.ones(5)}))
  received = variables.decode(np.pad(buffer, (0, 999)))
  np.testing.assert_array_equal(received.params['w'], np.ones(5))


def test_files_are_whole_few_and_alone(tmp_path):
  foreign = tmp_path / 'variables-notes.bin'
  foreign.write_text('keep')
  other = tmp_path / f'variables-{2:016x}-{1:012d}.bin'
  other.write_text('of another publisher')
  for version in range(1, 6):
    buffer = variables.encode(types.Variables(version, {'w': np.ones(9)}))
    pointer = variables.write_file(buffer, tmp_path, 1, version)
    read = variables.decode(variables.read_file(pointer))
    assert read.policy_version == version
  ours = sorted(p.name for p in tmp_path.glob(f'variables-{1:016x}-*'))
  assert [name[-7:] for name in ours] == ['004.bin', '005.bin']
  assert foreign.exists() and other.exists()
  assert len(list(tmp_path.iterdir())) == 4


def test_a_damaged_file_is_refused(tmp_path):
  buffer = variables.encode(types.Variables(1, {'w': np.ones(9)}))
  pointer = variables.write_file(buffer, tmp_path, 1, 1)
  with open(pointer.path, 'r+b') as file:
    file.seek(-1, os.SEEK_END)
    file.write(b'?')
  with pytest.raises(ValueError, match='must hold'):
    variables.read_file(pointer)


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  buffer = variables.encode(types.Variables(1, {'w': np.ones(9)}))
  with pytest.raises(OSError, match='No space left'):
    variables.write_file(buffer, tmp_path, 1, 1)
  assert list(tmp_path.iterdir()) == []


def test_pointers_are_told_from_variables():
  buffer = variables.encode(types.Variables(1, {}))
  assert variables.decode_pointer(buffer) is None
  pointer = variables.FilePointer(path='/x', num_bytes=3, crc32=4)
  assert variables.decode_pointer(variables.encode_pointer(pointer)) == pointer
