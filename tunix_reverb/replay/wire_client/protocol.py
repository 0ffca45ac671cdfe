"""The messages of a Reverb server's gRPC protocol, as Python classes.

`reverb.proto` and `tensorflow.proto` beside this module describe them;
`make protocol` compiles both into `protocol.binpb`, a descriptor set. It is
loaded into a pool of its own: in the default one, its names would collide with
those of dm-reverb and TensorFlow wherever a process holds both.
"""

from __future__ import annotations

import pathlib
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf import descriptor_pool
from google.protobuf import message_factory

DESCRIPTOR_FILE = pathlib.Path(__file__).with_name('protocol.binpb')

SERVICE = 'deepmind.reverb.ReverbService'


def _load() -> descriptor_pool.DescriptorPool:
  pool = descriptor_pool.DescriptorPool()
  files = descriptor_pb2.FileDescriptorSet.FromString(
    DESCRIPTOR_FILE.read_bytes()
  )
  for file in files.file:  # Each after those that it imports.
    pool.AddSerializedFile(file.SerializeToString())
  return pool


POOL = _load()


def _message(name: str) -> Any:
  return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


TensorProto = _message('tensorflow.TensorProto')
StructuredValue = _message('tensorflow.StructuredValue')

ChunkData = _message('deepmind.reverb.ChunkData')
PrioritizedItem = _message('deepmind.reverb.PrioritizedItem')
SampleInfo = _message('deepmind.reverb.SampleInfo')
TableInfo = _message('deepmind.reverb.TableInfo')

CheckpointRequest = _message('deepmind.reverb.CheckpointRequest')
CheckpointResponse = _message('deepmind.reverb.CheckpointResponse')
InsertStreamRequest = _message('deepmind.reverb.InsertStreamRequest')
InsertStreamResponse = _message('deepmind.reverb.InsertStreamResponse')
MutatePrioritiesRequest = _message('deepmind.reverb.MutatePrioritiesRequest')
MutatePrioritiesResponse = _message('deepmind.reverb.MutatePrioritiesResponse')
ResetRequest = _message('deepmind.reverb.ResetRequest')
ResetResponse = _message('deepmind.reverb.ResetResponse')
SampleStreamRequest = _message('deepmind.reverb.SampleStreamRequest')
SampleStreamResponse = _message('deepmind.reverb.SampleStreamResponse')
ServerInfoRequest = _message('deepmind.reverb.ServerInfoRequest')
ServerInfoResponse = _message('deepmind.reverb.ServerInfoResponse')
