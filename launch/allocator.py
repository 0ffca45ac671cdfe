"""How the process of a replay server keeps freed memory.

Reverb's threads pass many small objects on: one allocates a request's parts,
another frees them. glibc keeps only 7 freed objects of a size per thread, so
nearly every one takes an arena's lock. With room for more, a server of items of
1 kB takes 15 to 60% more of them (`benchmarks.transport`).
"""

from __future__ import annotations

import os
import sys

# Per size and thread, of objects up to 1 kB; glibc reads it at the start.
_TUNABLES = 'glibc.malloc.tcache_count=5000'


def keep_freed_memory() -> None:
  """Starts this process's program anew, once, with room for freed objects.

  Call it before anything else. Who has set GLIBC_TUNABLES has chosen already.
  """
  if 'GLIBC_TUNABLES' in os.environ:
    return
  os.execve(
    sys.executable,
    [sys.executable, *sys.orig_argv[1:]],
    os.environ | {'GLIBC_TUNABLES': _TUNABLES},
  )
