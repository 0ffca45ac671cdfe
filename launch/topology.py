"""Who listens where: the run's addresses as data."""

from __future__ import annotations

from collections.abc import Sequence
import json
import pathlib
import socket

from tunix_reverb import errors

_FILE = 'topology.json'


def pick_free_ports(count: int) -> list[int]:
  """`count` different TCP ports that nothing listens on now."""
  family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
  sockets = [socket.socket(family) for _ in range(count)]
  try:
    for s in sockets:
      s.bind(('', 0))
    return [s.getsockname()[1] for s in sockets]
  finally:
    for s in sockets:
      s.close()


def write(run_dir: pathlib.Path, replay_servers: Sequence[str]) -> None:
  """Writes `<run_dir>/topology.json`; addresses are host:port.

  Raises:
    errors.UserError: it cannot be written.
  """
  text = json.dumps({'replay_servers': list(replay_servers)}, indent=2) + '\n'
  try:
    write_atomically(run_dir / _FILE, text)
  except OSError as e:
    raise errors.UserError(
      f'{run_dir / _FILE} cannot be written: {e.strerror}'
    ) from e


def write_atomically(path: pathlib.Path, text: str) -> None:
  """Replaces `path` by `text`; on a full disk the old text stays.

  Raises:
    OSError: it cannot be written.
  """
  new = path.with_name(f'.{path.name}.new')
  try:
    new.write_text(text)
    new.replace(path)
  finally:
    new.unlink(missing_ok=True)


def replay_servers(
  given: Sequence[str] | None, run_dir: pathlib.Path | None
) -> list[str]:
  """Addresses from `--replay_servers`, or else from the run's topology file.

  Raises:
    errors.UserError: neither names any, or an address is not host:port.
  """
  addresses = list(given or ())
  if not addresses and run_dir is not None:
    addresses = _read(run_dir / _FILE)
  if not addresses:
    raise errors.UserError(
      'replay_servers (none) must name the servers as host:port,host:port, '
      'or run_dir must hold a topology.json'
    )
  for address in addresses:
    check_address('replay_servers', address)
  return addresses


def check_address(flag: str, address: str) -> None:
  """Refuses what is not host:port.

  Raises:
    errors.UserError: it is not; the message names the flag.
  """
  host, _, port = address.rpartition(':')
  if not host or not port.isdigit() or not 0 < int(port) < 65536:
    raise errors.UserError(
      f'{flag} ({address!r}) must be host:port, such as localhost:8000'
    )


def _read(path: pathlib.Path) -> list[str]:
  try:
    return list(json.loads(path.read_text())['replay_servers'])
  except FileNotFoundError:
    return []
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise errors.UserError(
      f'{path} must be JSON with a list "replay_servers": {e}'
    ) from e
