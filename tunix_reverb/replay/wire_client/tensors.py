"""Arrays out of the tensors of a chunk, allocated if bytes can fill them."""

from __future__ import annotations

import math
from typing import NamedTuple

import cramjam
import numpy as np

from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import wire_format

# The densest element of a Snappy block makes 64 bytes out of 3.
_MAX_RATIO = 22

# Headers remembered; they differ little from item to item.
_MAX_FORMS = 4096

_TENSOR_TAG = 0x0A
_CONTENT_TAG = 0x22

_decompress_into = cramjam.snappy.decompress_raw_into


class _Form(NamedTuple):
  """What a tensor's dtype and shape say.

  Attributes:
    dtype: of the elements.
    shape: time leading.
    num_bytes: of all elements.
    row_shape: without the time axis, if the tensor is a single row; [1] for a
      scalar, since what is decompressed into must have an axis.
    is_scalar: whether the row is one.
  """

  dtype: np.dtype
  shape: tuple[int, ...]
  num_bytes: int
  row_shape: tuple[int, ...] | None
  is_scalar: bool


class _Start(NamedTuple):
  """The bytes of a tensor up to its content, and what follows from them.

  Attributes:
    data: tag and size of the TensorProto, its header, tag and size of content.
    content: where the content starts, in bytes from the start of `data`.
    stop: where it stops.
    row_shape: of the array to be filled with it.
    dtype: likewise.
    num_bytes: likewise.
    is_scalar: whether the array's only axis is to go.
  """

  data: bytes
  content: int
  stop: int
  row_shape: tuple[int, ...]
  dtype: np.dtype
  num_bytes: int
  is_scalar: bool


class TensorReader:
  """Reads TensorProtos; remembers what their first bytes mean."""

  def __init__(self) -> None:
    self._forms: dict[bytes, _Form] = {}  # By dtype and shape.
    self._starts: dict[int, _Start] = {}  # The last one, by column.

  def read(
    self, data: bytes, start: int, stop: int, delta_encoded: bool
  ) -> np.ndarray:
    """A new array of the TensorProto in `data[start:stop]`, time leading.

    Raises:
      ValueError, IndexError, MemoryError, cramjam.DecompressionError: it is
        malformed.
    """
    dtype, shape, content = 0, (start, start), (start, start)
    for number, value in wire_format.fields(data, start, stop):
      if number == 1:
        dtype = wire_format.number(value)
      elif number == 2:
        shape = wire_format.span(value)
      elif number == 4:
        content = wire_format.span(value)
    form = _read_form(dtype, data, *shape)
    array = _fill(form, memoryview(data)[slice(*content)])
    if delta_encoded:
      _undo_delta(array)
    header = data[start : shape[1]]
    if header[:4] == bytes((0x08, dtype & 0x7F, 0x12, len(header) - 4 & 0x7F)):
      if len(self._forms) >= _MAX_FORMS:
        self._forms.clear()
      self._forms[header] = form
    return array

  def read_rows(
    self, data: bytes, start: int, stop: int, count: int
  ) -> list[np.ndarray] | None:
    """The only rows of the first `count` of the tensors in `data[start:stop]`.

    Quicker than `read`, which has to have read tensors of the same dtypes and
    shapes before.

    Returns:
      The rows, or None if `read` must see to the tensors one by one.

    Raises:
      IndexError, MemoryError, cramjam.DecompressionError: some are malformed.
    """
    view, rows = memoryview(data), []
    for column in range(count):
      known = self._starts.get(column)
      if known is None or not data.startswith(known[0], start):
        known = self._read_start(data, start)
        if known is None:
          return None
        self._starts[column] = known
      _, content, end, shape, dtype, num_bytes, is_scalar = known
      content += start
      start += end
      if start > stop:
        return None
      row = np.empty(shape, dtype)
      if _decompress_into(view[content:start], row) != num_bytes:
        return None
      rows.append(row[0, ...] if is_scalar else row)
    return rows

  def _read_start(self, data: bytes, start: int) -> _Start | None:
    """Reads a tensor up to its content; None if that is not worth it."""
    if data[start] != _TENSOR_TAG:
      return None
    size, header = wire_format.varint(data, start + 1)
    stop = header + size
    middle = header + 4 + data[header + 3]
    form = self._forms.get(data[header:middle])
    if form is None or form.row_shape is None or data[middle] != _CONTENT_TAG:
      return None
    size, content = wire_format.varint(data, middle + 1)
    if content + size != stop or form.num_bytes > _MAX_RATIO * size:
      return None
    return _Start(
      data[start:content],
      content - start,
      stop - start,
      form.row_shape,
      form.dtype,
      form.num_bytes,
      form.is_scalar,
    )


def _read_form(number: int, data: bytes, start: int, stop: int) -> _Form:
  """Reads a TensorShapeProto, of a tensor of TensorFlow's dtype `number`."""
  dtype = codec.DTYPES.get(number)
  if dtype is None:
    raise ValueError(f'its dtype ({number}) is unknown')
  shape = tuple(
    _read_size(data, *wire_format.span(dim))
    for index, dim in wire_format.fields(data, start, stop)
    if index == 2
  )
  if not shape or min(shape) < 0:
    raise ValueError(
      f'its shape ({list(shape)}) must have a time axis and no size below 0'
    )
  row_shape = shape[1:] if shape[0] == 1 and not dtype.hasobject else None
  return _Form(
    dtype,
    shape,
    math.prod(shape) * dtype.itemsize,
    (1,) if row_shape == () else row_shape,
    row_shape == (),
  )


def _read_size(data: bytes, start: int, stop: int) -> int:
  """Reads a TensorShapeProto.Dim."""
  size = 0
  for index, value in wire_format.fields(data, start, stop):
    if index == 1:
      size = wire_format.signed(value)
  return size


def _fill(form: _Form, content: memoryview) -> np.ndarray:
  """A new array of `form` with the elements in `content`."""
  dtype, shape, num_bytes = form[:3]
  if num_bytes > _MAX_RATIO * len(content):
    raise ValueError(
      f'{len(content)} bytes cannot hold {dtype} of shape {list(shape)}'
    )
  if dtype.hasobject:
    strings = codec.decode_strings(content, math.prod(shape))
    array = np.empty(len(strings), dtype)
    array[:] = strings
    return array.reshape(shape)
  array = np.empty(shape, dtype)
  if content and _decompress_into(content, array) != num_bytes:
    raise ValueError(f'its content must fill {dtype} of shape {list(shape)}')
  return array


def _undo_delta(array: np.ndarray) -> None:
  """Sums up along axis 0, in place, where Reverb differences."""
  if array.dtype.kind in 'iu' and array.ndim >= 2:
    unsigned = array.view(f'u{array.dtype.itemsize}')
    np.add.accumulate(unsigned, axis=0, dtype=unsigned.dtype, out=unsigned)
