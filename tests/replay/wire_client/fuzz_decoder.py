#!/usr/bin/env python
"""Looks for bytes that do harm to the decoder, guided by coverage (atheris).

pytest does not run this; it replays the corpus that it leaves. In a throw-away
environment (atheris has wheels for Python 3.11 and 3.12 on Linux):

    python3.11 -m venv /tmp/fuzz && . /tmp/fuzz/bin/activate
    pip install atheris cramjam ml_dtypes numpy protobuf
    export PYTHONPATH=$PWD && cd tests/replay/wire_client
    mkdir /tmp/found && ./fuzz_decoder.py --seed /tmp/found
    ./fuzz_decoder.py /tmp/found corpus -max_total_time=600
    ./fuzz_decoder.py -merge=1 corpus /tmp/found

`--seed` writes a response for each kind of poison, to start from. A finding is
written to `crash-...`; the last line adds to the corpus what reaches new code.
"""

import pathlib
import sys

import atheris

with atheris.instrument_imports(include=['tunix_reverb.replay.wire_client']):
  from tunix_reverb.replay.wire_client import test_utils

import numpy as np


def _seeds() -> dict[str, bytes]:
  """A response for each kind of poison, and sound ones."""
  arrays = [np.arange(4, dtype=np.float32)[np.newaxis], np.ones((1, 3), bool)]
  steps = np.arange(12, dtype=np.int32).reshape(4, 3)
  seeds = {}
  for kind in test_utils.POISON:
    chunk = test_utils.chunk(2**40, arrays)
    item = test_utils.whole_item(7, 2**40, 2)
    test_utils.poison(kind, chunk, item)
    seeds[kind.replace(' ', '_')] = test_utils.response([(item, [chunk])])
  whole = test_utils.whole_item(7, 2**40, 2)
  seeds['whole'] = test_utils.response(
    [(whole, [test_utils.chunk(2**40, arrays)])] * 2
  )
  strings = np.array([[b'', b'abc']], object)
  seeds['strings'] = test_utils.response(
    [(test_utils.whole_item(7, 3, 1), [test_utils.chunk(3, [strings])])]
  )
  columns = [([(1, 2, 2, 0), (2, 0, 1, 0)], False), ([(2, 1, 1, 0)], True)]
  chunks = [test_utils.chunk(i, [steps], delta_encoded=True) for i in (1, 2)]
  seeds['steps'] = test_utils.response(
    [(test_utils.item(7, columns), chunks)], chunks_per_entry=1
  )
  return {name: proto.SerializeToString() for name, proto in seeds.items()}


def main() -> None:
  if sys.argv[1:2] == ['--seed']:
    for name, message in _seeds().items():
      (pathlib.Path(sys.argv[2]) / name).write_bytes(message)
    return
  atheris.Setup(sys.argv, test_utils.read_anything)
  atheris.Fuzz()


if __name__ == '__main__':
  main()
