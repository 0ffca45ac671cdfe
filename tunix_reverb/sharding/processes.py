"""Several processes with one mesh: whose rows are whose, and what all agree on.

Each process holds some of the devices, and the rows of a batch that lie there.
A process that enters a collective waits for all others, for ever if they do not
come; so they exchange a few words on the host before, with a deadline. The
words go through the key-value store of JAX's coordinator, which is an order of
magnitude faster than a collective of the devices and keeps none of them busy.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.sharding import mesh as mesh_lib

_PREFIX = 'tunix_reverb'

Words = Mapping[str, int]


def compile_barrier() -> None:
  """Compiles the collective in which Orbax has the processes meet.

  All of them must call it; else the first checkpoint of a run compiles it.
  """
  multihost_utils.sync_global_devices(_PREFIX)


class Exchange:
  """Tells every process what each has to say, as often as all of them ask.

  Process 0 gathers and hands out, so that a round costs each of the others
  three calls, however many there are.
  """

  def __init__(self, *, timeout_s: float, start_timeout_s: float):
    """Call it once in each process, after `jax.distributed.initialize`.

    Args:
      timeout_s: how long a process waits for the others in one round.
      start_timeout_s: the same in the first round, before which each compiles.
    """
    # JAX has no public name for it; Orbax uses the same one.
    from jax._src import distributed

    self._client: Any = distributed.global_state.client
    mesh_lib.complete_client(self._client)
    self._timeout_s = timeout_s
    self._start_timeout_s = start_timeout_s
    self._round = 0
    self.index = jax.process_index()
    self.size = jax.process_count()

  def __call__(self, words: Words) -> list[Words]:
    """The words of every process, by index; all must call it equally often.

    Raises:
      errors.PeerLostError: a process did not call in time.
    """
    self._round += 1
    prefix = f'{_PREFIX}/{self._round}'
    said = json.dumps(words)
    if self.index:
      self._client.key_value_set(f'{prefix}/{self.index}', said)
      return json.loads(self._get(f'{prefix}/all', 0))
    gathered = [said] + [
      self._get(f'{prefix}/{i}', i) for i in range(1, self.size)
    ]
    everything = f'[{",".join(gathered)}]'
    self._client.key_value_set(f'{prefix}/all', everything)
    # All have read the last but one, or they would not have called again.
    if self._round > 2:
      self._client.key_value_delete(f'{_PREFIX}/{self._round - 2}/')
    return json.loads(everything)

  def _get(self, key: str, index: int) -> str:
    timeout_s = self._timeout_s if self._round > 1 else self._start_timeout_s
    try:
      return self._client.blocking_key_value_get(key, int(1000 * timeout_s))
    except RuntimeError as e:  # XlaRuntimeError, whose name changes.
      raise errors.PeerLostError(
        f'process {self.index} of {self.size} waited up to {timeout_s:g} s for '
        f'process {index}, which has died, hangs, or cannot be reached'
      ) from e


def num_processes(mesh: jax.sharding.Mesh) -> int:
  """How many processes hold devices of the mesh."""
  return len({device.process_index for device in mesh.devices.flat})


def by_process(devices: Sequence[jax.Device]) -> list[jax.Device]:
  """`devices` in the order of their processes."""
  return sorted(devices, key=lambda d: (d.process_index, d.id))


def check_rows(mesh: jax.sharding.Mesh) -> None:
  """Refuses a mesh on which processes do not hold rows of their own.

  Raises:
    ValueError: it is one, or it is more than this JAX can do on CPU.
  """
  shards, processes = mesh_lib.num_batch_shards(mesh), num_processes(mesh)
  blocks = mesh.devices.reshape(shards, -1)
  owners = [{d.process_index for d in block} for block in blocks]
  if shards % processes or any(len(owner) > 1 for owner in owners):
    raise ValueError(
      f'data_axis * fsdp_axis ({shards}) must be a multiple of num_learners '
      f'({processes}), each with as many devices: a process packs rows of its '
      'own, which sequence_axis and tensor_axis must not split over processes'
    )
  if mesh.devices.flat[0].platform != 'cpu' or mesh_lib.has_ordered_gloo():
    return
  if any(len({d.process_index for d in x.flat}) > 1 for x in mesh.devices):
    raise ValueError(
      f'data_axis ({mesh.shape[mesh_lib.DATA]}) must be a multiple of '
      f'num_learners ({processes}) on CPU with JAX {jax.__version__}, whose '
      'gloo cannot gather params from other processes: raise data_axis, or '
      'give launch.local a newer JAX with --learner_python'
    )


def place_local_rows(
  batch: types.Nest, mesh: jax.sharding.Mesh, spec: mesh_lib.PartitionSpec
) -> types.Nest:
  """Puts the batches of all processes together; every leaf is [B, ...] global.

  No process waits for another.

  Args:
    batch: leaves [B / processes, ...] of this process, on the host.
    mesh: where they go; see `check_rows`.
    spec: of every leaf.
  """
  sharding = jax.sharding.NamedSharding(mesh, spec)
  processes = num_processes(mesh)

  def place(x: np.ndarray) -> jax.Array:
    shape = (x.shape[0] * processes, *x.shape[1:])
    return jax.make_array_from_process_local_data(sharding, x, shape)

  return jax.tree_util.tree_map(place, batch)


def like(array: np.ndarray, placed: Any) -> Any:
  """A leaf of this process's rows, placed as another one of the batch is."""
  if isinstance(placed, np.ndarray) or placed.is_fully_addressable:
    return array
  return jax.make_array_from_process_local_data(
    placed.sharding, array, placed.shape
  )


def to_first(tree: types.Nest) -> types.Nest:
  """Copies global arrays to the host of process 0; all must call it.

  What process 0 holds already is copied from its shards. The rest is sent to
  all devices, of stacks (rank 3 and more) one entry at a time, so that no
  device needs memory for more.

  Returns:
    Nest of NumPy arrays in process 0, of None in the others.
  """
  return jax.tree_util.tree_map(_to_first, tree)


def _to_first(x: jax.Array) -> np.ndarray | None:
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return np.array(x)
  is_first = jax.process_index() == 0
  if _first_holds_all(x):
    return _from_shards(x) if is_first else None
  assert isinstance(x.sharding, jax.sharding.NamedSharding)
  replicated = jax.sharding.NamedSharding(
    x.sharding.mesh, mesh_lib.replicated_spec()
  )
  if x.ndim < 3:
    whole = _sender(_whole, replicated)(x)
    return np.array(whole) if is_first else None
  result = np.empty(x.shape, x.dtype) if is_first else None
  for i in range(x.shape[0]):
    entry = _sender(_entry, replicated)(x, i)
    if result is not None:
      result[i] = entry
  return result


def _first_holds_all(x: jax.Array) -> bool:
  """Whether every part of `x` lies on a device of process 0."""
  parts: dict[str, bool] = {}
  for device, index in x.sharding.devices_indices_map(x.shape).items():
    key = str(index)
    parts[key] = parts.get(key, False) or device.process_index == 0
  return all(parts.values())


def _from_shards(x: jax.Array) -> np.ndarray:
  whole = np.empty(x.shape, x.dtype)
  for shard in x.addressable_shards:
    whole[shard.index] = shard.data
  return whole


@functools.cache
def _sender(
  select: Callable[..., jax.Array], sharding: jax.sharding.NamedSharding
) -> Callable[..., jax.Array]:
  """Kept, so that JAX compiles it once for each shape."""
  return jax.jit(select, out_shardings=sharding)


def _whole(x: jax.Array) -> jax.Array:
  return x


def _entry(x: jax.Array, index: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
