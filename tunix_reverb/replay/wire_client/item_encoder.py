"""Trajectories to the bytes of an item; what fits no table is refused."""

from __future__ import annotations

from collections.abc import Sequence
import threading

from tunix_reverb import types
from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import entries
from tunix_reverb.replay.wire_client import encoder as encoder_lib
from tunix_reverb.replay.wire_client import insert_stream


class ItemEncoder:
  """Checks trajectories and encodes them under keys of its own.

  Args:
    columns: `Trajectories` of `ColumnSpec`.
    table: where each item goes.
    entry_tables: where an `entries.Entry` of it goes.
  """

  def __init__(
    self,
    columns: types.Trajectories,
    table: str,
    entry_tables: Sequence[str] = (),
  ):
    """Draws where its keys start."""
    self._codec = columns_lib.ColumnCodec(columns)
    self._table = table
    self._entry_tables = entry_tables
    self._encoder = encoder_lib.Encoder()
    self._keys = insert_stream.draw_item_keys()
    self._chunk_keys = insert_stream.draw_chunk_keys()
    self._lock = threading.Lock()

  def encode(
    self, item: types.Trajectories
  ) -> tuple[int, list[encoder_lib.Encoded]]:
    """The item's key and its part of a request.

    Raises:
      errors.SpecMismatchError: the columns differ from the signature.
      ValueError: a negative `policy_version`, lengths that contradict the
        columns, or several permits where entries are asked for.
    """
    arrays = self._codec.arrays(item)
    with self._lock:
      layout = self._encoder.layout(arrays)
      if layout.num_transitions is None:  # The first of these shapes.
        self._codec.flatten(item)
      _check_lengths(item, layout)
      priority = columns_lib.priority(item)
      key = next(self._keys)
      encoded = self._encoder.encode(
        arrays, [(self._table, key, priority)], next(self._chunk_keys), layout
      )
      if not self._entry_tables:
        return key, [encoded]
      return key, [self._encode_entry(item, key, priority), encoded]

  def _encode_entry(
    self, item: types.Trajectories, key: int, priority: float
  ) -> encoder_lib.Encoded:
    if item.permit_id[1:].any():
      raise ValueError(
        f'permit_id ({item.permit_id.tolist()}) must be one, of the first '
        'trajectory: items balanced by permits are removed one by one'
      )
    entry = entries.Entry(
      key=key,
      policy_version=int(priority),
      created_at_s=item.created_at_s.min(),
      permit_id=item.permit_id[0],
      length=item.lengths.max(),
    )
    return self._encoder.encode(
      entries.encode_entry(entry),
      [(table, key, priority) for table in self._entry_tables],
      next(self._chunk_keys),
    )


def _check_lengths(
  item: types.Trajectories, layout: encoder_lib.Layout
) -> None:
  """Refuses lengths that contradict the columns.

  Shapes that agreed once agree with any lengths of the same number and sum.
  """
  lengths = item.lengths.tolist()
  if min(lengths, default=0) > 0 and sum(lengths) == layout.num_transitions:
    return
  problem = columns_lib.inconsistency(item)
  if problem:
    raise ValueError(f"the item's columns must agree: {problem}")
  layout.num_transitions = sum(lengths)
