"""What an item of the table of variables holds: whole, checked, or nothing."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tunix_reverb.replay import publications


def _columns(payload: bytes, chunk_bytes: int) -> list[np.ndarray]:
  """The columns of an item, as a client reads them."""
  timesteps = publications.pack(
    publications.Publication(np.frombuffer(payload, np.uint8), 7, 1.5),
    chunk_bytes,
  )
  return [np.stack(column) for column in zip(*timesteps)]


@hypothesis.settings(deadline=None)
@hypothesis.given(st.binary(min_size=1, max_size=300), st.integers(1, 400))
def test_any_payload_comes_back(payload, chunk_bytes):
  columns = _columns(payload, chunk_bytes)
  received = publications.unpack(columns)
  assert received.payload.tobytes() == payload
  assert (received.publisher, received.published_at_s) == (7, 1.5)
  names_and_specs = publications.COLUMNS.items()
  assert [name for name, _ in names_and_specs] == sorted(publications.COLUMNS)
  for column, (_, spec) in zip(columns, names_and_specs):
    assert spec.accepts(column[0])


@hypothesis.settings(deadline=None)
@hypothesis.given(
  st.binary(min_size=1, max_size=300), st.integers(1, 400), st.data()
)
def test_any_changed_byte_is_noticed(payload, chunk_bytes, data):
  columns = _columns(payload, chunk_bytes)
  at = data.draw(st.integers(0, len(payload) - 1))
  columns[1] = columns[1].copy()
  columns[1].reshape(-1)[at] ^= data.draw(st.integers(1, 255))
  with pytest.raises(ValueError, match='checksum'):
    publications.unpack(columns)


@pytest.mark.parametrize(
  'damage',
  [
    lambda c: c[:-1],
    lambda c: [c[0], c[1][:1], *c[2:]],
    lambda c: [c[0], c[1], c[2] + 1000, *c[3:]],
    lambda c: [c[0], c[1], -c[2], *c[3:]],
    lambda c: [c[0].astype(np.uint64), *c[1:]],
    lambda c: [c[0], c[1].reshape(-1), *c[2:]],
    lambda c: [column[:0] for column in c],
  ],
  ids=['columns', 'cut', 'longer', 'negative', 'dtype', 'rank', 'empty'],
)
def test_what_is_not_as_published_is_refused(damage):
  with pytest.raises(ValueError, match='published variables'):
    publications.unpack(damage(_columns(b'0123456789', 4)))
