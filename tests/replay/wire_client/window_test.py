"""What is sent in one request, sent again, and taken for confirmed."""

import pytest

from tunix_reverb.replay.wire_client import encoder
from tunix_reverb.replay.wire_client import window as window_lib


def _add(window, key, num_bytes=1000, copies=1):
  window.add(key, [encoder.Encoded([key], num_bytes)], copies)


def test_all_that_is_pending_goes_in_one_request_oldest_first():
  window = window_lib.Window(4)
  for key in range(4):
    assert not window.full
    _add(window, key)
  assert window.full and len(window) == 4
  assert window.take() == [0, 1, 2, 3]
  assert not window.has_unsent
  assert window.take() == []


@pytest.mark.parametrize(
  ('num_bytes', 'items'), [(10, 64), (2**18, 4), (2**20, 1), (2**24, 1)]
)
def test_a_request_is_bounded_in_items_and_bytes(num_bytes, items):
  window = window_lib.Window(200)
  for key in range(200):
    _add(window, key, num_bytes)
  assert window.take() == list(range(items))
  assert window.take()[0] == items


def test_an_item_is_confirmed_once_all_its_copies_are():
  window = window_lib.Window(8)
  for key in range(2):
    _add(window, key, copies=3)
  window.take()
  window.confirm([0, 1, 0])
  assert len(window) == 2
  window.confirm([0, 7])  # Nobody knows 7.
  assert len(window) == 1 and window.confirmed == 1


def test_those_who_wait_are_woken_for_half_of_the_window():
  window = window_lib.Window(4)
  for key in range(4):
    _add(window, key)
  woken = []
  for key in range(4):
    window.confirm([key])
    woken.append(window.has_room)
  assert woken == [False, True, True, True]


def test_a_broken_stream_sends_again_what_is_unconfirmed():
  window = window_lib.Window(8)
  for key in range(4):
    _add(window, key, copies=2)
  window.send_again(same_server=False)  # The first stream.
  window.take()
  assert window.resent == 0
  window.confirm([0, 0, 1])
  _add(window, 4, copies=2)
  window.send_again(same_server=True)
  assert window.take() == [1, 2, 3, 4]
  assert window.resent == 3
  window.confirm([1])  # What the broken stream confirmed does not count.
  assert len(window) == 4


def test_a_restarted_server_is_sent_what_it_confirmed_at_last(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(window_lib.time, 'monotonic', lambda: clock[0])
  window = window_lib.Window(3)
  for key in range(6):
    _add(window, key)
    window.take()
    clock[0] += 0.6
    window.confirm([key])
  assert window.confirmed == 6
  window.end_stream()
  assert not window.is_settled
  clock[0] += 100.0  # Nobody serves.
  _add(window, 6)
  window.send_again(same_server=False)
  # 5 was confirmed now and 4 0.6 s before.
  assert window.take() == [4, 5, 6]
  assert window.confirmed == 4 and window.resent == 2
  window.confirm([4, 5, 6])
  assert window.confirmed == 7
  clock[0] += 20.0
  window.end_stream()
  assert window.is_settled
  window.send_again(same_server=True)
  assert window.take() == []
