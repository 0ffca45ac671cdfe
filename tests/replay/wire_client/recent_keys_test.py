"""Remembered keys: at least so many, and never more than twice as many."""

from tunix_reverb.replay.wire_client import recent_keys


def test_the_last_keys_are_known_and_old_ones_are_forgotten():
  recent = recent_keys.RecentKeys(3)
  assert all(recent.add(key) for key in range(10))
  assert not any(recent.add(key) for key in (9, 8, 7))
  assert recent.add(0)
  assert len(recent._newer) + len(recent._older) <= 6
