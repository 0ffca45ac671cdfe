"""Writes params as a directory that `transformers` loads.

One tensor at a time leaves its devices, so that neither host nor disk ever
holds the model twice. The value head, which no language model has, goes into a
file of its own that `transformers` does not look at.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
import functools
import json
import math
import pathlib
from typing import Any

import numpy as np

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.models import checkpoint as checkpoint_lib
from tunix_reverb.models import huggingface_config
from tunix_reverb.models import layout
from tunix_reverb.models import safetensors_file
from tunix_reverb.networks.transformer import config as config_lib

# Our names of dtypes -> those of safetensors.
DTYPES = {'bfloat16': 'BF16', 'float16': 'F16', 'float32': 'F32'}
_MAX_FILE_BYTES = 5 * 10**9


def save(
  directory: pathlib.Path,
  config: config_lib.TransformerConfig,
  params: types.Nest,
  *,
  dtype: str,
  base: Mapping[str, Any] | None = None,
  max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
  """Writes config.json, the tensors, and our own params beside them.

  Args:
    directory: made if absent; must hold no model.
    config: of the model.
    params: its params, NumPy's or whole on this process's devices.
    dtype: of the language model's tensors, a key of DTYPES; our own params are
      float32 always.
    base: `Checkpoint.description` of the model that this one was made from.
    max_file_bytes: of the tensors of one file.

  Raises:
    errors.UserError: the directory holds a model, or no family of
      `transformers` is like this model.
  """
  described = huggingface_config.dump(config, dtype=dtype)
  directory.mkdir(parents=True, exist_ok=True)
  if (directory / checkpoint_lib.CONFIG_NAME).exists():
    raise errors.UserError(
      f'{directory} holds a model already; name another directory'
    )
  leaves = layout.flatten(params)
  origins = layout.origins(config)
  entries = [
    entry
    for path, origin in origins.items()
    for entry in _entries(origin, leaves[path])
  ]
  _write_tensors(directory, entries, DTYPES[dtype], max_file_bytes)
  own = [
    safetensors_file.Entry(
      '.'.join(path), leaf.shape, functools.partial(_whole, leaf)
    )
    for path, leaf in leaves.items()
    if path not in origins
  ]
  safetensors_file.write(
    directory / checkpoint_lib.EXTRAS_NAME, own, dtype='F32'
  )
  # Last: a directory without it is not taken for a model.
  if base is not None:
    # A whole description is kept as it is, in the words that it was in.
    whole = 'model_type' in base
    described = {**({} if whole else described), **base, 'torch_dtype': dtype}
    described.pop('dtype', None)
  (directory / checkpoint_lib.CONFIG_NAME).write_text(
    json.dumps(described, indent=2) + '\n', encoding='utf-8'
  )


def _entries(
  origin: layout.Origin, leaf: Any
) -> Iterable[safetensors_file.Entry]:
  """The tensors that a param becomes."""
  shape = origin.shape(leaf.shape)
  for i, name in enumerate(origin.names):
    yield safetensors_file.Entry(
      name, shape, functools.partial(_tensor, origin, leaf, i)
    )


def _tensor(origin: layout.Origin, leaf: Any, i: int) -> Iterable[np.ndarray]:
  tensor = np.asarray(leaf[i] if origin.is_stacked else leaf)
  yield tensor.T if origin.is_transposed else tensor


def _whole(leaf: Any) -> Iterable[np.ndarray]:
  yield np.asarray(leaf)


def _write_tensors(
  directory: pathlib.Path,
  entries: list[safetensors_file.Entry],
  dtype: str,
  max_file_bytes: int,
) -> None:
  """Into one file, or into several with an index."""
  size = safetensors_file.DTYPES[dtype].itemsize
  files: list[list[safetensors_file.Entry]] = [[]]
  room = max_file_bytes
  for entry in entries:
    needed = math.prod(entry.shape) * size
    if files[-1] and needed > room:
      files.append([])
      room = max_file_bytes
    files[-1].append(entry)
    room -= needed
  if len(files) == 1:
    safetensors_file.write(
      directory / safetensors_file.SINGLE_NAME, entries, dtype=dtype
    )
    return
  total = 0
  names: dict[str, str] = {}
  for i, file in enumerate(files):
    name = f'model-{i + 1:05d}-of-{len(files):05d}.safetensors'
    total += safetensors_file.write(directory / name, file, dtype=dtype)
    names |= {entry.name: name for entry in file}
  index = {'metadata': {'total_size': total}, 'weight_map': names}
  (directory / safetensors_file.INDEX_NAME).write_text(
    json.dumps(index, indent=2) + '\n', encoding='utf-8'
  )
