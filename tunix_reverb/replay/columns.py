"""An item's columns as a flat list of arrays, checked in both directions.

Clients send and receive arrays in the order of their sorted paths; this module
maps between that list and `Trajectories`, refuses what the table's signature
does not allow, and finds items whose columns contradict each other. Letters:
N trajectories, S transitions over all of them (see `types`).
"""

from __future__ import annotations

from collections.abc import Sequence
import itertools
from typing import Any

import numpy as np
import tree

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types

_MAX_LAYOUTS = 4096


class ColumnCodec:
  """Maps between `Trajectories` and arrays in the order of sorted paths."""

  def __init__(self, columns: types.Trajectories):
    """Args: columns: `Trajectories` of `ColumnSpec`."""
    self._columns = columns
    self._leaf_specs = tree.flatten(columns)
    paths = _paths(columns)
    # _order[i] is the leaf that comes i-th by path; _rank is its inverse.
    self._order = sorted(range(len(paths)), key=paths.__getitem__)
    self._rank = np.argsort(self._order).tolist()
    self.paths = [paths[i] for i in self._order]
    self._specs = [self._leaf_specs[i] for i in self._order]
    self._fields = self._make_fields()
    # Transitions of each layout of an item that was found in order.
    self._transitions: dict[tuple, int] = {}

  def flatten(self, trajectories: types.Trajectories) -> list[np.ndarray]:
    """The columns of `trajectories`, ordered by path.

    Raises:
      errors.SpecMismatchError: a column is missing, unknown, or its shape or
        dtype differs from the signature; all such columns are named.
    """
    arrays = self.arrays(trajectories)
    if not all(s.accepts(a) for s, a in zip(self._specs, arrays)):
      raise errors.SpecMismatchError(self._explain(trajectories))
    return arrays

  def arrays(self, trajectories: types.Trajectories) -> list[np.ndarray]:
    """As `flatten`, but their shapes and dtypes are for the caller to check.

    For one who knows them from an item before, which saves most of the time.
    """
    leaves: list[Any] = []
    try:
      for column, value in zip(self._columns, trajectories, strict=True):
        if isinstance(column, specs.ColumnSpec):
          leaves.append(value)
        else:
          tree.assert_same_structure(column, value, check_types=False)
          leaves += tree.flatten(value)
      return [
        leaf if type(leaf) is np.ndarray else np.asarray(leaf)
        for leaf in [leaves[i] for i in self._order]
      ]
    except (TypeError, ValueError) as e:
      raise errors.SpecMismatchError(self._explain(trajectories)) from e

  def unflatten(self, arrays: Sequence[np.ndarray]) -> types.Trajectories:
    """The inverse of `flatten`.

    Raises:
      errors.SpecMismatchError: the arrays differ from the signature.
    """
    if len(arrays) != len(self._specs):
      raise errors.SpecMismatchError(
        f'an item has {len(arrays)} columns where the signature has '
        f'{len(self._specs)}'
      )
    for path, spec, array in zip(self.paths, self._specs, arrays):
      if not spec.accepts(array):
        raise errors.SpecMismatchError(
          f'column {path} is {_spec_of(array)} where the signature has {spec}'
        )
    return self._assemble(arrays)

  def read(self, arrays: Sequence[np.ndarray]) -> types.Trajectories:
    """As `unflatten`, of arrays that must not contradict each other.

    Layouts that passed are remembered: it is mostly the checks that cost.

    Raises:
      errors.SpecMismatchError: the arrays differ from the signature, or they
        have an `inconsistency`.
    """
    layout = tuple([(array.dtype, array.shape) for array in arrays])
    transitions = self._transitions.get(layout)
    if transitions is not None:
      item = self._assemble(arrays)
      lengths = item.lengths.tolist()
      if min(lengths) > 0 and sum(lengths) == transitions:
        return item
    item = self.unflatten(arrays)
    problem = inconsistency(item)
    if problem:
      raise errors.SpecMismatchError(problem)
    if len(self._transitions) >= _MAX_LAYOUTS:
      self._transitions.clear()
    self._transitions[layout] = sum(item.lengths.tolist())
    return item

  def _make_fields(self) -> list[tuple[types.Nest, list[int]]]:
    """Of each field: its columns, and where their arrays come by path."""
    fields, ranks = [], iter(self._rank)
    for columns in self._columns:
      count = len(tree.flatten(columns))
      fields.append((columns, list(itertools.islice(ranks, count))))
    return fields

  def _assemble(self, arrays: Sequence[np.ndarray]) -> types.Trajectories:
    return types.Trajectories._make(
      arrays[ranks[0]]
      if isinstance(columns, specs.ColumnSpec)
      else tree.unflatten_as(columns, [arrays[i] for i in ranks])
      for columns, ranks in self._fields
    )

  def _explain(self, trajectories: types.Trajectories) -> str:
    ours = dict(zip(self.paths, self._specs))
    theirs = specs.flatten_columns(trajectories)
    lines = []
    for path in sorted(ours.keys() | theirs.keys()):
      spec = ours.get(path)
      if spec is None:
        lines.append(f'column {path}: written, but not in the signature')
      elif path not in theirs:
        lines.append(f'column {path}: the signature has {spec}, none written')
      elif not spec.accepts(np.asarray(theirs[path])):
        lines.append(
          f'column {path}: written as {_spec_of(np.asarray(theirs[path]))}, '
          f'the signature has {spec}'
        )
    detail = '; '.join(lines) or 'the nesting of the columns differs'
    return f"the item must match the table's signature: {detail}"


def inconsistency(item: types.Trajectories) -> str | None:
  """Says in which way an item's columns contradict each other, if they do.

  Downstream code slices columns by `lengths`: an item that passes cannot send
  it out of range.
  """
  lengths = item.lengths
  n = lengths.shape[0]
  if n == 0 or int(lengths.min()) < 1:
    return f'lengths ({lengths.tolist()}) must hold one or more, all >= 1'
  s = int(lengths.sum(dtype=np.int64))
  expected = {
    'observation': s + n,
    'core_state': n,
    'created_at_s': n,
    'actor_id': n,
    'episode_id': n,
    'truncated': n,
    'permit_id': n,
    'action': s,
    'reward': s,
    'discount': s,
    'behaviour_log_prob': s,
    'policy_version': s,
    'loss_mask': s,
    'turn_id': s,
    'advantage': s,
  }  # pyformat: skip
  for name, size in expected.items():
    for leaf in tree.flatten(getattr(item, name)):
      if leaf.shape[0] != size:
        return (
          f'{name} has {leaf.shape[0]} rows where lengths '
          f'({lengths.tolist()}) ask for {size}'
        )
  return None


def priority(item: types.Trajectories) -> float:
  """The item's priority: its minimum `policy_version`.

  Raises:
    ValueError: it is negative, which would end a prioritised table for good.
  """
  version = int(np.minimum.reduce(item.policy_version))
  if version < 0:
    raise ValueError(
      f'policy_version ({version}) must be >= 0: a negative priority ends a '
      'prioritised table; the first published version is 1'
    )
  return float(version)


def _paths(columns: types.Trajectories) -> list[str]:
  """Path of each leaf, in the order of `tree.flatten(columns)`."""
  index = tree.unflatten_as(columns, range(len(tree.flatten(columns))))
  by_path = specs.flatten_columns(index)
  return sorted(by_path, key=by_path.__getitem__)


def _spec_of(array: np.ndarray) -> specs.ColumnSpec:
  return specs.ColumnSpec(array.shape, array.dtype)
