"""The checked-in protocol: what its sources say, and what Reverb speaks."""

import subprocess
import sys

from google.protobuf import descriptor_pb2
import pytest

from tunix_reverb.replay.wire_client import protocol

_DIRECTORY = protocol.DESCRIPTOR_FILE.parent
_Field = descriptor_pb2.FieldDescriptorProto

# Reverb's field is an enum of TensorFlow, which is the same on the wire.
_ENUM_FOR_INT32 = (_Field.TYPE_INT32, _Field.TYPE_ENUM)


def _messages(
  prefix: str, messages
) -> dict[str, descriptor_pb2.DescriptorProto]:
  """Messages by full name, nested ones included."""
  found = {}
  for message in messages:
    name = f'{prefix}.{message.name}'
    found[name] = message
    found |= _messages(name, message.nested_type)
  return found


def _in_file_set(files) -> dict[str, descriptor_pb2.DescriptorProto]:
  found = {}
  for file in files.file:
    found |= _messages(file.package, file.message_type)
  return found


def _checked_in() -> descriptor_pb2.FileDescriptorSet:
  return descriptor_pb2.FileDescriptorSet.FromString(
    protocol.DESCRIPTOR_FILE.read_bytes()
  )


def test_the_descriptor_set_is_what_the_sources_compile_to(tmp_path):
  pytest.importorskip('grpc_tools', reason='grpcio-tools, of `make setup`')
  compiled = tmp_path / 'protocol.binpb'
  subprocess.run(
    [
      sys.executable,
      '-m',
      'grpc_tools.protoc',
      f'-I{_DIRECTORY}',
      '--include_imports',
      f'--descriptor_set_out={compiled}',
      'reverb.proto',
    ],
    check=True,
    timeout=60,
  )
  ours = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
  # A compiler may write the same content in other bytes.
  assert ours == _checked_in(), 'run `make protocol`'


def test_messages_come_from_a_pool_of_their_own():
  default = descriptor_pb2.DESCRIPTOR.pool
  assert protocol.ChunkData.DESCRIPTOR.file.pool is not default
  assert protocol.POOL.FindServiceByName(protocol.SERVICE)


def _reverbs_pool():
  """Descriptors of the messages that dm-reverb itself was built with."""
  from reverb.cc import schema_pb2  # Loads TensorFlow's messages as well.

  return schema_pb2.DESCRIPTOR.pool


def _facts(field: descriptor_pb2.FieldDescriptorProto) -> tuple:
  return (field.number, field.label, field.type, field.type_name)


@pytest.mark.replay
def test_every_field_is_reverbs_own_by_name_number_type_and_label():
  pool = _reverbs_pool()
  ours = {
    name: message
    for name, message in _in_file_set(_checked_in()).items()
    if name.startswith(('deepmind.reverb.', 'tensorflow.'))
  }
  assert len(ours) > 40
  checked = 0
  for name, message in ours.items():
    theirs = descriptor_pb2.DescriptorProto()
    try:
      pool.FindMessageTypeByName(name).CopyToProto(theirs)
    except KeyError:
      # Of the wheel, only the schema is there in Python, not the service.
      assert name.endswith(('Request', 'Response', 'SampleEntry')), name
      continue
    their_fields = {field.name: field for field in theirs.field}
    for field in message.field:
      their_field = their_fields[field.name]
      mine, other = _facts(field), _facts(their_field)
      if (field.type, their_field.type) == _ENUM_FOR_INT32:
        assert field.name == 'dtype', f'{name}.{field.name}'
        mine, other = mine[:2], other[:2]
      assert mine == other, f'{name}.{field.name}'
      checked += 1
  assert checked > 90


@pytest.mark.replay
def test_our_bytes_are_reverbs_bytes():
  """A message with every kind of field, through both sets of classes."""
  from reverb.cc import schema_pb2

  item = protocol.PrioritizedItem(
    key=2**64 - 1, table='t', priority=1.5, times_sampled=3
  )
  item.inserted_at.seconds = 7
  column = item.flat_trajectory.columns.add(squeeze=True)
  column.chunk_slices.add(chunk_key=5, offset=1, length=2, index=3)
  theirs = schema_pb2.PrioritizedItem.FromString(item.SerializeToString())
  assert theirs.key == 2**64 - 1 and theirs.inserted_at.seconds == 7
  assert theirs.flat_trajectory.columns[0].chunk_slices[0].index == 3
  assert theirs.SerializeToString() == item.SerializeToString()

  chunk = protocol.ChunkData(chunk_key=9, delta_encoded=True)
  tensor = chunk.data.tensors.add(dtype=1, tensor_content=b'abc')
  tensor.tensor_shape.dim.add(size=2)
  theirs = schema_pb2.ChunkData.FromString(chunk.SerializeToString())
  assert theirs.data.tensors[0].dtype == 1  # DT_FLOAT
  assert theirs.SerializeToString() == chunk.SerializeToString()
