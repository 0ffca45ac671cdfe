"""Safetensors files, ours and any bytes that claim to be one."""

import hypothesis
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.models import safetensors_file

_HEADERS = st.one_of(
  st.binary(max_size=80),
  st.sampled_from(
    [
      b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
      b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
      b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,-8]}}',
      b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
      b'{"a":{"dtype":"F32","shape":"x","data_offsets":[0,8]}}',
      b'{"a":{"dtype":"I4","shape":[2],"data_offsets":[0,1]}}',
      b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}',
      b'{"a":[]}',
      b'[1]',
      b'{}',
    ]
  ),
)


@hypothesis.given(_HEADERS, st.integers(-3, 3))
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_any_file_is_read_or_refused(tmp_path_factory, header, off):
  path = tmp_path_factory.mktemp('a') / 'model.safetensors'
  length = max(0, len(header) + off)
  path.write_bytes(length.to_bytes(8, 'little') + header + bytes(8))
  try:
    source = safetensors_file.SafetensorsSource([path])
  except errors.UserError as e:
    assert str(path) in str(e)
    return
  for name in source.names():
    whole = tuple(slice(0, n) for n in source.shape(name))
    assert source.read(name, whole).shape == source.shape(name)


@pytest.mark.parametrize('dtype', safetensors_file.DTYPES)
def test_every_dtype_comes_back_part_by_part(dtype, tmp_path):
  values = np.arange(12).reshape(4, 3).astype(safetensors_file.DTYPES[dtype])
  parts = lambda: (values[:1], values[1:])
  path = tmp_path / 'model.safetensors'
  entries = [
    safetensors_file.Entry('a', (4, 3), parts),
    safetensors_file.Entry('b', (), lambda: [np.float32(2.5)]),
  ]
  assert safetensors_file.write(path, entries, dtype=dtype) == (
    13 * values.itemsize
  )
  assert not list(tmp_path.glob('*.tmp'))
  source = safetensors_file.SafetensorsSource([path])
  part = source.read('a', (slice(1, 3), slice(0, 2)))
  assert part.dtype == values.dtype
  np.testing.assert_array_equal(part, values[1:3, :2])
  assert source.read('b', ()) == ml_dtypes.bfloat16(2.5)


def test_an_index_must_name_files_beside_it(tmp_path):
  index = tmp_path / safetensors_file.INDEX_NAME
  for text in ('{', '[]', '{"weight_map": 3}'):
    index.write_text(text)
    with pytest.raises(errors.UserError, match='not an index'):
      safetensors_file.find(tmp_path)
  for name in ('absent.safetensors', '../other.safetensors'):
    index.write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(errors.UserError, match='which is not there'):
      safetensors_file.find(tmp_path)
