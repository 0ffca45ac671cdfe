"""Token trajectories of `benchmarks.learner`, and a server with actors of them.

  python -m benchmarks.learner_data

serves a queue of them, keeps it full, prints its address, and ends with its
stdin.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
import sys
import threading
import time

VOCABULARY = 4096  # Of the preset '10m'.
ROW_LENGTH = 1024
# Of the lengths in tokens: log-normal and cut.
_MEDIAN, _SIGMA, _SHORTEST = 128, 1.2, 16
_ITEM_TRAJECTORIES = 2
_QUEUE_ITEMS = 64
_TIMEOUT_S = 1.0


def columns():
  """`Trajectories` of `ColumnSpec`."""
  from dm_env import specs as dm_specs
  import numpy as np

  from tunix_reverb import specs

  token = dm_specs.BoundedArray((), np.uint16, 0, VOCABULARY - 1)
  return specs.trajectories_spec(
    specs.EnvironmentSpec(
      token,
      token,
      dm_specs.Array((), np.float32),
      dm_specs.BoundedArray((), np.float32, 0, 1),
    ),
    has_turns=True,
  )


def items(seed: int) -> Iterator:
  """`types.Trajectories` without end: prompts, turns, a reward at the end."""
  import numpy as np

  from tunix_reverb import types

  rng = np.random.default_rng(seed)
  n = _ITEM_TRAJECTORIES
  while True:
    drawn = np.rint(rng.lognormal(np.log(_MEDIAN), _SIGMA, n))
    # A trajectory of T + 1 tokens has T transitions.
    lengths = np.clip(drawn, _SHORTEST, ROW_LENGTH).astype(np.int32) - 1
    total, ends = int(lengths.sum()), np.cumsum(lengths)
    reward = np.zeros(total, np.float32)
    reward[ends - 1] = rng.normal(size=n)
    place = np.arange(total) - np.repeat(ends - lengths, lengths)
    token = lambda k: rng.integers(0, VOCABULARY, k).astype(np.uint16)
    yield types.Trajectories(
      observation=token(total + n),
      action=token(total),
      reward=reward,
      discount=np.ones(total, np.float32),
      behaviour_log_prob=np.full(total, -np.log(VOCABULARY), np.float32),
      policy_version=np.zeros(total, np.int32),
      loss_mask=place >= lengths.min() // 4,
      core_state=(),
      lengths=lengths,
      created_at_s=np.full(n, time.time()),
      actor_id=np.zeros(n, np.int32),
      episode_id=np.arange(n, dtype=np.int64),
      truncated=np.zeros(n, np.bool_),
      permit_id=np.zeros(n, np.int64),
      turn_id=(place // 32).astype(np.int32),
    )


def _write(address: str, stop: threading.Event) -> None:
  from tunix_reverb.replay import clients

  writer = clients.make_writer(address, columns=columns())
  for item in items(seed=0):
    while not stop.is_set() and not writer.write(item, _TIMEOUT_S):
      pass
    if stop.is_set():
      break
  writer.close(timeout_s=1.0)


def main() -> None:
  """Entry point."""
  os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
  from tunix_reverb.replay import clients
  from tunix_reverb.replay import tables

  server = clients.make_server(
    config=tables.TableConfig(max_items=_QUEUE_ITEMS),
    columns=columns(),
    port=0,
    checkpoint_dir=None,
  )
  stop = threading.Event()
  thread = threading.Thread(target=_write, args=(server.address, stop))
  thread.start()
  print(server.address, flush=True)
  sys.stdin.read()
  stop.set()
  thread.join()
  # Stopping waits for clients; nothing here is worth to wait for.
  os._exit(0)


if __name__ == '__main__':
  main()
