"""Poison items in a real server cost the wire client themselves, and no more.

Several of them end a process that reads with the official client.
"""

import threading
import time

import numpy as np
import pytest

from tunix_reverb.replay import client_names
from tunix_reverb.replay import clients
from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils as replay_test_utils
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.replay.wire_client import protocol
from tunix_reverb.replay.wire_client import sample_stream
from tunix_reverb.replay.wire_client import test_utils

pytestmark = pytest.mark.timeout(90)

_COLUMNS = replay_test_utils.columns()
_KINDS = list(test_utils.POISON)
_FIRST_KEY = 10**6


def _insert(address: str, requests) -> None:
  """Inserts (chunk, item) pairs, one request each; waits for all of them."""
  confirmed = threading.Event()

  def encoded():
    for chunk, item in requests:
      request = protocol.InsertStreamRequest(chunks=[chunk], items=[item])
      yield request.SerializeToString()
    confirmed.wait(30.0)

  awaited = {item.key for _, item in requests}
  with connection.open_channel(address) as channel:
    stream = insert_stream.open_stream(channel, encoded(), 30.0)
    for response in stream:
      awaited -= set(response.keys)
      if not awaited:
        break
    confirmed.set()
    stream.cancel()
  assert not awaited


def _pair(episode_id: int, key: int, priority: float = 1.0):
  """A sound item and its only chunk, as messages."""
  codec = columns_lib.ColumnCodec(_COLUMNS)
  arrays = codec.flatten(replay_test_utils.item(episode_id, lengths=(4,)))
  chunk = test_utils.chunk(2**40 + key, [array[np.newaxis] for array in arrays])
  item = test_utils.whole_item(key, chunk.chunk_key, len(arrays))
  item.priority = priority
  return chunk, item


def _poisoned():
  """A sound item before every kind of poison, and one at the end."""
  requests = []
  for i, kind in enumerate(_KINDS):
    requests.append(_pair(i, i))
    chunk, item = _pair(99, _FIRST_KEY + i)
    test_utils.poison(kind, chunk, item)
    requests.append((chunk, item))
  requests.append(_pair(len(_KINDS), len(_KINDS)))
  return requests


def _sampler(server, closing):
  return closing(
    clients.make_sampler(
      [server.address], columns=_COLUMNS, client=client_names.WIRE
    )
  )


def _size(server) -> int:
  states = clients.limiter_state(server.address, 5.0, client=client_names.WIRE)
  return states[tables.TRAJECTORIES].current_size


def _read_until_clean(server, sampler) -> None:
  deadline_s = time.monotonic() + 40.0
  while _size(server) > len(_KINDS) + 1:
    assert time.monotonic() < deadline_s, sampler.poison_items
    for _ in range(20):
      assert sampler.sample(10.0).trajectories.episode_id[0] != 99
  assert _size(server) == len(_KINDS) + 1


def test_a_queue_gives_every_sound_item_in_order(serve, closing):
  server = serve(tables.TableConfig(max_items=100))
  _insert(server.address, _poisoned())
  sampler = _sampler(server, closing)
  ids = [
    int(sampler.sample(10.0).trajectories.episode_id[0])
    for _ in range(len(_KINDS) + 1)
  ]
  assert ids == list(range(len(_KINDS) + 1))
  assert sampler.poison_items == len(_KINDS)
  assert sampler.poison_keys == [_FIRST_KEY + i for i in range(len(_KINDS))]
  assert sampler.broken_streams == 0


def test_where_items_stay_the_poison_is_deleted(serve, closing):
  server = serve(
    tables.TableConfig(
      mode='replay', max_items=100, samples_per_insert_tolerance=1e6
    )
  )
  requests = _poisoned()
  _insert(server.address, requests)
  sampler = _sampler(server, closing)
  assert _size(server) == len(requests)
  _read_until_clean(server, sampler)
  assert set(sampler.poison_keys) == {
    _FIRST_KEY + i for i in range(len(_KINDS))
  }


def test_a_puller_names_the_poison_and_goes_on(serve, closing):
  server = serve(tables.TableConfig(max_items=100))
  requests = _poisoned()
  _insert(server.address, requests)
  puller = closing(sample_stream.Puller(server.address, tables.TRAJECTORIES))
  keys = []
  deadline_s = time.monotonic() + 20.0
  while len(keys) < len(_KINDS) + 1:
    assert time.monotonic() < deadline_s
    keys += [item.key for item in puller.pull(10, 1.0)]
  assert keys == list(range(len(_KINDS) + 1))
  assert list(puller.poison) == [_FIRST_KEY + i for i in range(len(_KINDS))]


@pytest.mark.replay
def test_an_official_reader_of_what_is_left_is_safe(serve, closing):
  """Once the wire client has deleted the poison by key."""
  server = serve(
    tables.TableConfig(
      mode='replay', max_items=100, samples_per_insert_tolerance=1e6
    )
  )
  _insert(server.address, _poisoned())
  sampler = _sampler(server, closing)
  _read_until_clean(server, sampler)
  sampler.close()
  official = closing(
    clients.make_sampler(
      [server.address], columns=_COLUMNS, client=client_names.OFFICIAL
    )
  )
  for _ in range(200):
    assert official.sample(10.0) is not None
  assert official.poison_items == 0
