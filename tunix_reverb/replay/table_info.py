"""A server's answer about its tables, as plain records.

Both clients get the same `TableInfo` message, each in a class of its own with
the same fields; nothing here cares which.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import codec

# A dimension that a spec of unknown rank has; no array has it.
_UNKNOWN_RANK = (-1,)


def limiter_state(info: Any) -> tables.LimiterState:
  """The state of the table's rate limiter. Args: info: `TableInfo`."""
  limiter = info.rate_limiter_info
  inserts = limiter.insert_stats.completed
  samples = limiter.sample_stats.completed
  ratio, min_size = limiter.samples_per_insert, limiter.min_size_to_sample
  return tables.LimiterState(
    current_size=info.current_size,
    max_size=info.max_size,
    inserts_completed=inserts,
    samples_completed=samples,
    # The limiter's own rules; what it knows of deletes is the table's size.
    can_insert=(
      info.current_size + 1 <= min_size
      or (inserts + 1) * ratio - samples <= limiter.max_diff
    ),
    can_sample=(
      info.current_size >= min_size
      and inserts * ratio - samples - 1 >= limiter.min_diff
    ),
    inserts_blocked_s=info.table_worker_time.waiting_for_sampling_ms / 1000,
    samples_blocked_s=info.table_worker_time.waiting_for_inserts_ms / 1000,
  )


def describe(info: Any) -> tables.TableDescription:
  """What the table is. Args: info: `TableInfo`."""
  limiter = info.rate_limiter_info
  sampler = info.sampler_options
  kind = sampler.WhichOneof('distribution') or 'unknown'
  prioritised = kind == 'prioritized'
  return tables.TableDescription(
    name=info.name,
    mode='queue' if info.max_times_sampled == 1 else 'replay',
    sampler='prioritised' if prioritised else kind,
    priority_exponent=(
      sampler.prioritized.priority_exponent if prioritised else 0.0
    ),
    max_items=info.max_size,
    min_items=limiter.min_size_to_sample,
    samples_per_insert=limiter.samples_per_insert,
    min_diff=limiter.min_diff,
    max_diff=limiter.max_diff,
    signature=signature(info),
  )


def signature(info: Any) -> dict[str, specs.ColumnSpec]:
  """The table's signature by path; empty for a table without one.

  A path is the way through the signature's nest, such as 'core_state/0'; ''
  if the signature is a single spec.

  Args:
    info: `TableInfo`.
  """
  if not info.HasField('signature'):
    return {}
  return {'/'.join(path): spec for path, spec in _leaves(info.signature, ())}


def check_signature(
  address: str,
  served: Mapping[str, tables.TableDescription],
  columns: types.Trajectories,
  table_config: tables.TableConfig,
) -> None:
  """Refuses a server whose trajectory table differs from what this run needs.

  Args:
    address: of the server, for the message.
    served: what it serves, by table.
    columns: `Trajectories` of `ColumnSpec` of this run.
    table_config: the trajectory table of this run.

  Raises:
    errors.SpecMismatchError: it differs; every difference is listed.
  """
  if tables.TRAJECTORIES not in served:
    error = missing_table(address, tables.TRAJECTORIES, served)
    raise errors.SpecMismatchError(f'{error}: is it another program?')
  lines = tables.differences(
    tables.describe(table_config, columns),
    served[tables.TRAJECTORIES],
    'the server',
  )
  if lines:
    raise errors.SpecMismatchError(
      f'this run and replay server {address} must agree: {"; ".join(lines)}. '
      'Start every role with the same flags'
    )


def missing_table(
  address: str, table: str, served: Iterable[str]
) -> errors.SpecMismatchError:
  """The error that the server at `address` serves no `table`."""
  return errors.SpecMismatchError(
    f'replay server {address} must serve a table {table!r}; it serves '
    f'{", ".join(sorted(served)) or "none"}'
  )


def _leaves(
  value: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], specs.ColumnSpec]]:
  """Path and spec of each leaf below a `StructuredValue`."""
  kind = value.WhichOneof('kind')
  content = getattr(value, kind) if kind else None
  if kind in ('tensor_spec_value', 'bounded_tensor_spec_value'):
    yield path, _spec(content)
  elif kind == 'dict_value':
    for key in sorted(content.fields):
      yield from _leaves(content.fields[key], (*path, key))
  elif kind == 'named_tuple_value':
    for pair in content.values:
      yield from _leaves(pair.value, (*path, pair.key))
  elif kind in ('list_value', 'tuple_value'):
    for i, child in enumerate(content.values):
      yield from _leaves(child, (*path, str(i)))


def _spec(content: Any) -> specs.ColumnSpec:
  """A `TensorSpecProto` or bounded one as a spec; strings are objects."""
  shape = tuple(
    None if dim.size == -1 else dim.size for dim in content.shape.dim
  )
  if content.shape.unknown_rank:
    shape = _UNKNOWN_RANK
  return specs.ColumnSpec(
    shape, codec.DTYPES.get(content.dtype, np.dtype(object))
  )
