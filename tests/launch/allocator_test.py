"""The replay server's process starts anew with room for freed objects."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os, sys
print('starts', flush=True)
from launch import allocator
allocator.keep_freed_memory()
print(os.getpid(), os.environ['GLIBC_TUNABLES'], sys.argv[1:])
"""


@pytest.mark.parametrize(
  ('given', 'starts', 'expected'),
  [
    (None, 2, 'glibc.malloc.tcache_count=5000'),
    ('glibc.malloc.tcache_count=9', 1, 'glibc.malloc.tcache_count=9'),
  ],
)
def test_process_starts_anew_once_unless_the_user_has_chosen(
  given, starts, expected
):
  environ = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
  if given:
    environ['GLIBC_TUNABLES'] = given
  with subprocess.Popen(
    [sys.executable, '-c', _PROGRAM, '--an_argument'],
    env=environ,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    lines = process.communicate(timeout=60)[0].splitlines()
  assert lines[:-1] == ['starts'] * starts
  assert lines[-1] == f"{process.pid} {expected} ['--an_argument']"
