"""What a table says of itself, for tables of this package and of others."""

import collections

import ml_dtypes
import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb.replay import client_names
from tunix_reverb.replay import clients
from tunix_reverb.replay import table_info
from tunix_reverb.replay.wire_client import protocol

pytestmark = pytest.mark.timeout(60)

_Step = collections.namedtuple('_Step', ['zeta', 'alpha'])


def _spec(proto, dtype: int, *sizes: int) -> None:
  """Fills a TensorSpecProto."""
  proto.dtype = dtype
  for size in sizes:
    proto.shape.dim.add(size=size)


def test_a_path_is_the_way_through_the_nest():
  info = protocol.TableInfo()
  fields = info.signature.dict_value.fields
  _spec(fields['b'].tensor_spec_value, 1, -1, 3)
  _spec(fields['a'].list_value.values.add().tensor_spec_value, 14)
  bounded = fields['a'].list_value.values.add().bounded_tensor_spec_value
  _spec(bounded, 4, 0)
  pairs = fields['a'].list_value.values.add().named_tuple_value.values
  _spec(pairs.add(key='y').value.tuple_value.values.add().tensor_spec_value, 7)
  _spec(pairs.add(key='x').value.tensor_spec_value, 99)
  pairs[1].value.tensor_spec_value.shape.unknown_rank = True
  assert table_info.signature(info) == {
    'a/0': specs.ColumnSpec((), ml_dtypes.bfloat16),
    'a/1': specs.ColumnSpec((0,), np.uint8),
    'a/2/y/0': specs.ColumnSpec((), object),
    'a/2/x': specs.ColumnSpec((-1,), object),
    'b': specs.ColumnSpec((None, 3), np.float32),
  }
  assert not table_info.signature(info)['a/2/x'].accepts(np.array(None))


def test_a_table_may_have_one_spec_or_none():
  info = protocol.TableInfo()
  assert table_info.signature(info) == {}
  _spec(info.signature.tensor_spec_value, 9, 2)
  assert table_info.signature(info) == {'': specs.ColumnSpec((2,), np.int64)}


@pytest.mark.replay
def test_both_clients_describe_the_tables_of_others_alike():
  import reverb
  import tensorflow as tf

  signature = {
    'steps': _Step(
      tf.TensorSpec([None, 2], tf.float32),
      (tf.TensorSpec([], tf.string), [tf.TensorSpec([None], tf.bfloat16)]),
    ),
    'bounded': tf.TensorSpec(None, tf.int32),
  }
  table = reverb.Table(
    name='theirs',
    sampler=reverb.selectors.Lifo(),
    remover=reverb.selectors.Fifo(),
    max_size=7,
    max_times_sampled=3,
    rate_limiter=reverb.rate_limiters.MinSize(2),
    signature=signature,
  )
  bare = reverb.Table.queue('bare', 5)
  server = reverb.Server([table, bare])
  try:
    wire, official = (
      clients.describe(f'localhost:{server.port}', 10.0, client=client)
      for client in client_names.CLIENTS
    )
  finally:
    server.stop()
  assert wire == official
  assert wire['bare'].signature == {}
  assert (wire['bare'].mode, wire['bare'].max_items) == ('queue', 5)
  theirs = wire['theirs']
  assert (theirs.mode, theirs.sampler, theirs.min_items) == (
    'replay',
    'lifo',
    2,
  )
  assert theirs.signature == {
    'bounded': specs.ColumnSpec((-1,), np.int32),
    'steps/zeta': specs.ColumnSpec((None, 2), np.float32),
    'steps/alpha/0': specs.ColumnSpec((), object),
    'steps/alpha/1/0': specs.ColumnSpec((None,), ml_dtypes.bfloat16),
  }
