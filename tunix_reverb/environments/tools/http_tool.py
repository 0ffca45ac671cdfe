"""HTTP for the policy, to the places on a list and nowhere else.

  http_tool.make(['https://api.example.org/v1/', 'http://127.0.0.1:8080'])

A place is a scheme, a host, a port (the scheme's own if left out) and the
beginning of a path. A host that is named by a private or loopback address, or
as localhost, may be reached there; one named otherwise only at public
addresses. The address that was checked is the one that is connected to, and
every redirect is checked like the first request. Proxies are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import ipaddress
import socket
import time
from typing import Any
import urllib.parse

from tunix_reverb import errors
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool

_PORTS = {'http': 80, 'https': 443}
_MAX_REDIRECTS = 3
_TRANSIENT = (429, 502, 503, 504)

Resolve = Callable[[str, int], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Place:
  """What may be reached.

  Attributes:
    scheme: 'http' or 'https'.
    host: in lower case.
    port: of it.
    path: that a request's path must begin with.
  """

  scheme: str
  host: str
  port: int
  path: str

  @classmethod
  def parse(cls, url: str) -> Place:
    """Raises ValueError if `url` is no HTTP URL with a host."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
      raise ValueError(f'{url!r} must be http:// or https:// and a host')
    if parts.username is not None or parts.password is not None:
      raise ValueError(f'{url!r} must hold no user and password')
    port = _PORTS[parts.scheme] if parts.port is None else parts.port
    return cls(parts.scheme, parts.hostname, port, parts.path or '/')

  @property
  def is_private(self) -> bool:
    """Whether it is named by an address that is not public."""
    try:
      return not ipaddress.ip_address(self.host).is_global
    except ValueError:
      return self.host == 'localhost'

  def holds(self, other: Place) -> bool:
    """Whether a request to `other` is allowed here."""
    same = (self.scheme, self.host, self.port)
    if same != (other.scheme, other.host, other.port):
      return False
    # Not /v1 for /v10, and no way back up.
    path = urllib.parse.unquote(other.path)
    if '..' in path.split('/') or '\\' in path:
      return False
    return path == self.path or path.startswith(self.path.rstrip('/') + '/')


def make(
  places: Iterable[str],
  *,
  methods: Sequence[str] = ('GET', 'POST'),
  max_bytes: int = 1 << 20,
  resolve: Resolve | None = None,
  **limits: Any,
) -> tool.Tool:
  """Makes the tool `http`.

  Args:
    places: URLs; see the module's docstring.
    methods: that may be used.
    max_bytes: of a response; the rest is not read.
    resolve: the addresses of a host and port; the system's by default.
    **limits: of `tool.Limits`; a `timeout_s` is needed.

  Raises:
    errors.UserError: no place, or one that is no URL.
    errors.MissingExtraError: httpx is not installed.
  """
  try:
    import httpx  # noqa: F401 - found missing now, not at a call.
  except ImportError as e:
    raise errors.MissingExtraError(
      f"the http tool needs httpx ({e}): pip install 'tunix_reverb[agents]'"
    ) from e
  try:
    allowed = [Place.parse(url) for url in places]
  except ValueError as e:
    raise errors.UserError(f'places of the http tool: {e}') from e
  if not allowed:
    raise errors.UserError('places (empty) must name what may be reached')
  client = _Client(allowed, methods, max_bytes, resolve or _resolve)

  @tool.tool(**{'timeout_s': 10.0, **limits})
  def http(
    url: str,
    method: str = 'GET',
    body: str | None = None,
  ) -> str:
    """Makes an HTTP request; returns the status and the body.

    Args:
      url: with its scheme.
      method: such as GET.
      body: of the request; JSON if it looks like it.
    """
    return client.request(method.upper(), url, body, made.limits.timeout_s)

  made: tool.Tool = http
  if made.limits.timeout_s is None:
    raise errors.UserError('timeout_s (None) of the http tool must be seconds')
  names = ', '.join(sorted(f'{p.scheme}://{p.host}:{p.port}' for p in allowed))
  description = f'{made.description} Only these can be reached: {names}.'
  return dataclasses.replace(made, description=description)


def _resolve(host: str, port: int) -> list[str]:
  """The addresses of `host`."""
  found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  return [str(address[0]) for *_, address in found]


class _Client:
  """Checks and makes requests."""

  def __init__(
    self,
    allowed: Sequence[Place],
    methods: Sequence[str],
    max_bytes: int,
    resolve: Resolve,
  ):
    self._allowed = allowed
    self._methods = methods
    self._max_bytes = max_bytes
    self._resolve = resolve

  def request(
    self, method: str, url: str, body: str | None, timeout_s: float
  ) -> str:
    """The status line and body of the response, redirects followed."""
    if method not in self._methods:
      raise taxonomy.ToolError(
        f'method {method} is not allowed; use {", ".join(self._methods)}'
      )
    deadline = time.monotonic() + timeout_s
    for _ in range(_MAX_REDIRECTS + 1):
      status, location, text = self._once(method, url, body, deadline)
      if location is None:
        break
      url = urllib.parse.urljoin(url, location)
      if status == 303 or (status in (301, 302) and method == 'POST'):
        method, body = 'GET', None
    else:
      raise taxonomy.ToolError(f'more than {_MAX_REDIRECTS} redirects')
    if status in _TRANSIENT:
      raise taxonomy.ToolError(f'HTTP {status}\n{text}', is_transient=True)
    return f'HTTP {status}\n{text}'

  def _check(self, url: str) -> tuple[Place, str]:
    """The place of `url`, and the address to connect to."""
    try:
      place = Place.parse(url)
    except ValueError as e:
      raise taxonomy.ToolError(f'the URL {e}') from e
    holders = [allowed for allowed in self._allowed if allowed.holds(place)]
    if not holders:
      raise taxonomy.ToolError(f'{url} is not among what can be reached')
    try:
      addresses = self._resolve(place.host, place.port)
    except OSError as e:
      raise taxonomy.ToolError(f'{place.host} was not found: {e}') from e
    for address in addresses:
      is_public = ipaddress.ip_address(address.partition('%')[0]).is_global
      if is_public or place.is_private:
        return place, address
    raise taxonomy.ToolError(f'{place.host} is at no public address')

  def _once(
    self, method: str, url: str, body: str | None, deadline: float
  ) -> tuple[int, str | None, str]:
    """One request: its status, where it redirects to, and its text."""
    import httpx

    place, address = self._check(url)
    given = httpx.URL(url)
    headers = {'Host': given.netloc.decode('ascii')}
    if body is not None and body.lstrip()[:1] in ('{', '['):
      headers['Content-Type'] = 'application/json'
    left_s = max(0.01, deadline - time.monotonic())
    try:
      with (
        httpx.Client(trust_env=False, timeout=left_s) as client,
        client.stream(
          method,
          given.copy_with(host=address),
          headers=headers,
          content=body,
          # The certificate is that of the name, not of the address.
          extensions={'sni_hostname': place.host},
        ) as response,
      ):
        location = response.headers.get('location')
        is_redirect = response.is_redirect and location is not None
        text = '' if is_redirect else self._read(response, deadline)
        return response.status_code, location if is_redirect else None, text
    except httpx.TimeoutException as e:
      raise TimeoutError(type(e).__name__) from e
    except (httpx.HTTPError, httpx.InvalidURL) as e:
      is_transient = isinstance(e, httpx.TransportError)
      raise taxonomy.ToolError(
        f'{type(e).__name__}: {e}', is_transient=is_transient
      ) from e

  def _read(self, response: Any, deadline: float) -> str:
    """The body, up to the limit; what is no text is named."""
    data = bytearray()
    for chunk in response.iter_bytes(8192):
      data += chunk
      if len(data) >= self._max_bytes:
        break
      if time.monotonic() > deadline:
        raise TimeoutError('the response did not end')
    kind = response.headers.get('content-type', 'text/plain')
    if not any(word in kind for word in ('text', 'json', 'xml', 'javascript')):
      return f'[{len(data)} bytes of {kind}]'
    return bytes(data[: self._max_bytes]).decode('utf-8', 'replace')
