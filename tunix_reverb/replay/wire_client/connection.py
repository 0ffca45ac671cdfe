"""gRPC channels to a replay server, and unary calls that end by a deadline."""

from __future__ import annotations

from typing import Any

import grpc

from tunix_reverb.replay.wire_client import protocol

# What a call or a stream raises when its status is not OK.
StatusError = grpc.RpcError

_OPTIONS = (
  # An item may be of any size.
  ('grpc.max_send_message_length', -1),
  ('grpc.max_receive_message_length', -1),
  # An http_proxy of the environment would break even localhost.
  ('grpc.enable_http_proxy', 0),
  # A server that restarts is found again within a second.
  ('grpc.initial_reconnect_backoff_ms', 100),
  ('grpc.max_reconnect_backoff_ms', 1000),
  # Also what one attempt to connect may take: a busy server answers late.
  ('grpc.min_reconnect_backoff_ms', 5000),
  # Else all channels of a process to one address share one connection.
  ('grpc.use_local_subchannel_pool', 1),
)


def open_channel(address: str) -> grpc.Channel:
  """A channel to 'host:port'; connects when it is first used."""
  return grpc.insecure_channel(address, options=_OPTIONS)


def call(
  channel: grpc.Channel, method: str, request: Any, timeout_s: float
) -> Any:
  """Calls a unary method and returns its response.

  Args:
    channel: from `open_channel`.
    method: such as 'ServerInfo'; its messages are `<method>Request` and
      `<method>Response` of `protocol`.
    request: the request message.
    timeout_s: seconds until the answer must be there.

  Raises:
    StatusError: no answer in time, or the server refuses; `status_text` says
      which.
  """
  response_type = getattr(protocol, f'{method}Response')
  return channel.unary_unary(
    path(method),
    request_serializer=type(request).SerializeToString,
    response_deserializer=response_type.FromString,
  )(request, timeout=timeout_s)


def path(method: str) -> str:
  """The method's full name on the wire."""
  return f'/{protocol.SERVICE}/{method}'


def status_text(error: grpc.RpcError) -> str:
  """The error's status in one line, such as 'UNAVAILABLE: ...'."""
  return f'{error.code().name}: {error.details()}'
