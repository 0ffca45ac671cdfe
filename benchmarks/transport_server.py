"""The replay server of `benchmarks.transport`, in a process of its own.

  python -m benchmarks.transport_server '{"a": 1000, "b": 50}' 100

serves tables 'a' and 'b', which hold that many items, evict the oldest and
never block, and a queue named 'queue' of 100 items; prints its port, and ends
with its stdin. Reverb itself, in a process that allocates as ours does.
"""

from __future__ import annotations

import json
import os
import sys

from launch import allocator


def main() -> None:
  """Entry point."""
  allocator.keep_freed_memory()
  os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
  import reverb

  tables, queue_size = json.loads(sys.argv[1]), int(sys.argv[2])
  server = reverb.Server(
    tables=[
      reverb.Table(
        name=name,
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=max_size,
        rate_limiter=reverb.rate_limiters.MinSize(1),
      )
      for name, max_size in tables.items()
    ]
    + [reverb.Table.queue('queue', queue_size)]
  )
  print(server.port, flush=True)
  sys.stdin.read()
  # Stopping waits for clients; nothing here is worth to wait for.
  os._exit(0)


if __name__ == '__main__':
  main()
