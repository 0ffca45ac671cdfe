"""Reads what a Reverb checkpoint holds, to find items that nobody would find.

A checkpoint takes the tables one after the other, in no order that anybody
chooses, while inserts and deletes go on. So an item may be in it without its
entry in the index: inserted after the index was taken, or deleted, entry and
all, before the index was but after the item was. Restored, it would be in the
table for good: no sweeper would know of it. Such items are read from the files.

Reverb writes `items.tfrecord` and `chunks.tfrecord`, TFRecord files in zlib's
format that hold `PrioritizedItem`s of all tables and the `ChunkData`s that they
refer to.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Iterator
import logging
import pathlib
import struct
from typing import Any
from typing import BinaryIO
import zlib

import numpy as np

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import entries
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import decoder as decoder_lib
from tunix_reverb.replay.wire_client import protocol

_READ_BYTES = 1 << 20
# Length and its checksum before a record, and the record's checksum after it.
_HEADER = struct.Struct('<QI')
_FOOTER_BYTES = 4


class CheckpointItems:
  """The trajectories of one checkpoint, read when they are asked for.

  The files are opened at once: they may be deleted while their server runs.
  """

  def __init__(self, directory: pathlib.Path, columns: types.Trajectories):
    """Opens the files.

    Args:
      directory: that Reverb wrote them to.
      columns: `Trajectories` of `ColumnSpec`, the table's signature.

    Raises:
      OSError: there is no such file.
    """
    self._codec = columns_lib.ColumnCodec(columns)
    self._items = open(directory / 'items.tfrecord', 'rb')
    self._chunks = open(directory / 'chunks.tfrecord', 'rb')

  def missing_entries(self, known: Container[int]) -> list[entries.Entry]:
    """Entries of all trajectories but the `known` ones.

    Reads chunks only if there are any.

    Args:
      known: keys of items that are not asked for.

    Raises:
      OSError, zlib.error, ValueError: the files are damaged.
    """
    missing = []
    for record in _records(self._items):
      item = protocol.PrioritizedItem.FromString(record)
      if item.table == tables.TRAJECTORIES and item.key not in known:
        missing.append(item)
    if not missing:
      return []
    keys = {key for item in missing for key in _chunk_keys(item)}
    chunks = _find_chunks(self._chunks, keys)
    return [_entry(item, chunks, self._codec) for item in missing]

  def close(self) -> None:
    """Closes the files; idempotent."""
    self._items.close()
    self._chunks.close()


def _entry(
  item: Any, chunks: dict[int, Any], codec: columns_lib.ColumnCodec
) -> entries.Entry:
  """The entry that the writer of `item` wrote of it."""
  # The answer of a server that is asked for this item.
  answer = protocol.SampleStreamResponse()
  sample = answer.entries.add(end_of_sequence=True)
  sample.info.item.CopyFrom(item)
  sample.data.extend(chunks[key] for key in _chunk_keys(item) if key in chunks)
  try:
    (encoded,) = decoder_lib.Splitter().split(answer.SerializeToString())
    decoded = decoder_lib.Decoder().decode(encoded)
    trajectories = codec.unflatten(decoded.columns)
  except (errors.PoisonItemError, errors.SpecMismatchError) as e:
    # Too old at the latest when it is as long in the table as it may be old.
    logging.warning('item %d of the checkpoint is unreadable: %s', item.key, e)
    inserted_at_s = item.inserted_at.ToNanoseconds() / 1e9
    return entries.Entry(item.key, int(item.priority), inserted_at_s, 0, 0)
  return entries.Entry(
    key=item.key,
    policy_version=int(np.min(trajectories.policy_version)),
    created_at_s=float(np.min(trajectories.created_at_s)),
    permit_id=int(trajectories.permit_id[0]),
    length=int(np.sum(trajectories.lengths)),
  )


def _chunk_keys(item: Any) -> list[int]:
  """Keys of the chunks that `item` refers to, each once, in its order."""
  return list(
    dict.fromkeys(
      chunk.chunk_key
      for column in item.flat_trajectory.columns
      for chunk in column.chunk_slices
    )
  )


def _find_chunks(file: BinaryIO, keys: set[int]) -> dict[int, Any]:
  """The `ChunkData`s of `keys`, as far as they are in the file."""
  found: dict[int, Any] = {}
  for record in _records(file):
    chunk = protocol.ChunkData.FromString(record)
    if chunk.chunk_key in keys:
      found[chunk.chunk_key] = chunk
      if len(found) == len(keys):
        break
  return found


def _records(file: BinaryIO) -> Iterator[bytes]:
  """The records of a TFRecord file in zlib's format, one after the other.

  Checksums of single records are not looked at: zlib has one of the whole.
  """
  file.seek(0)
  pending = bytearray()
  for block in _inflate(file):
    pending += block
    start = 0
    while len(pending) - start >= _HEADER.size:
      size, _ = _HEADER.unpack_from(pending, start)
      stop = start + _HEADER.size + size
      if len(pending) < stop + _FOOTER_BYTES:
        break
      yield bytes(pending[start + _HEADER.size : stop])
      start = stop + _FOOTER_BYTES
    del pending[:start]
  if pending:
    raise ValueError(f'{file.name} ends within a record')


def _inflate(file: BinaryIO) -> Iterator[bytes]:
  inflater = zlib.decompressobj()
  is_empty = True
  while block := file.read(_READ_BYTES):
    is_empty = False
    yield inflater.decompress(block)
  yield inflater.flush()
  if not (inflater.eof or is_empty):
    raise ValueError(f'{file.name} is cut off')
