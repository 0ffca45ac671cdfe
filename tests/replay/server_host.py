"""Many replay servers in one process, for tests of a lane that cannot serve.

Reads a JSON object per line of its stdin and answers each with one: `{"start":
config, "port": port}` with where it serves, `{"stop": port}` with `{}`.
"""

import json
import os
import sys

from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils


def main() -> None:
  servers = {}
  for line in sys.stdin:
    order = json.loads(line)
    answer = {}
    if 'start' in order:
      server = clients.make_server(
        config=tables.TableConfig(**order['start']),
        columns=test_utils.columns(),
        port=order['port'],
        checkpoint_dir=None,
      )
      servers[server.port] = server
      answer = {'address': server.address, 'port': server.port}
    else:
      servers.pop(order['stop']).stop(20.0)
    print(json.dumps(answer), flush=True)
  os._exit(0)


if __name__ == '__main__':
  main()
