"""Protobuf's encoding as protobuf itself writes it, and what is not that."""

import pytest

from tunix_reverb.replay.wire_client import protocol
from tunix_reverb.replay.wire_client import wire_format


def _fields(message) -> dict:
  data = b'??' + message.SerializeToString()
  found = dict(wire_format.fields(data, 2, len(data)))
  return {
    number: data[slice(*value)] if isinstance(value, tuple) else value
    for number, value in found.items()
  }


def test_fields_of_every_wire_type():
  item = protocol.PrioritizedItem(
    key=2**64 - 1, table='t' * 200, priority=0.5, times_sampled=-1
  )
  item.flat_trajectory.columns.add()
  assert _fields(item) == {
    1: 2**64 - 1,
    2: b't' * 200,
    5: b'\0\0\0\0\0\0\xe0\x3f',
    6: 2**64 - 1,
    8: b'\x0a\0',
  }


@pytest.mark.parametrize('value', [0, 1, 127, 128, 2**31, 2**63 - 1, -1])
def test_signed_numbers(value):
  info = protocol.SampleInfo(table_size=value)
  assert wire_format.signed(_fields(info).get(3, 0)) == value


@pytest.mark.parametrize(
  'data',
  [
    b'\x08',  # A tag without a value.
    b'\x08\xff',  # A varint without an end.
    b'\x08' + b'\xff' * 10 + b'\x01',  # Eleven bytes of it.
    b'\x0a\x05abc',  # Bytes beyond the end.
    b'\x0a',
    b'\x09\0\0\0',  # Half a double.
    b'\x0b',  # A group.
    b'\x0f',  # No wire type at all.
  ],
)
def test_what_is_no_message(data):
  with pytest.raises((ValueError, IndexError)):
    list(wire_format.fields(data, 0, len(data)))


def test_a_field_must_end_with_its_message_though_the_data_goes_on():
  with pytest.raises(ValueError, match='ends at byte 7 of 4'):
    list(wire_format.fields(b'\x0a\x05abcdefgh', 0, 4))


def test_a_field_of_another_kind():
  with pytest.raises(ValueError, match='where a message should'):
    wire_format.span(3)
  for read in (wire_format.number, wire_format.signed):
    with pytest.raises(ValueError, match='where a number should'):
      read((0, 1))
