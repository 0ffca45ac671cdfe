"""A replay server as a process: `server_main.py CONFIG_JSON PORT DIRECTORY`.

Prints where it serves; then writes a checkpoint per 'checkpoint' line of its
stdin, and stops at the end of it.
"""

import json
import os
import pathlib
import sys

from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils


def main() -> None:
  config, port, directory = sys.argv[1:]
  server = clients.make_server(
    config=tables.TableConfig(**json.loads(config)),
    columns=test_utils.columns(),
    port=int(port),
    checkpoint_dir=pathlib.Path(directory) if directory else None,
  )
  facts = {
    'address': server.address,
    'port': server.port,
    'restored_from': str(server.restored_from or ''),
  }
  print(json.dumps(facts), flush=True)
  for _ in sys.stdin:
    print(server.checkpoint(20.0), flush=True)
  server.stop(10.0)
  os._exit(0)


if __name__ == '__main__':
  main()
