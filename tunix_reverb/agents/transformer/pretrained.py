"""What `--model` names: the sizes of a preset, or a pretrained model."""

from __future__ import annotations

import dataclasses
import pathlib

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.models import checkpoint as checkpoint_lib
from tunix_reverb.models import saving
from tunix_reverb.networks.transformer import config as model_config
from tunix_reverb.networks.transformer import presets
from tunix_reverb.text import huggingface
from tunix_reverb.text import tokeniser


def open_checkpoint(name: str) -> checkpoint_lib.Checkpoint | None:
  """The pretrained model of that path; None if `name` is a preset's.

  Raises:
    errors.UserError: it is a path, and what is there is no known model.
  """
  if name in presets.PRESETS:
    return None
  return checkpoint_lib.open_checkpoint(name)


def chat_format(name: str) -> tokeniser.ChatFormat | None:
  """The conversations of the pretrained model; None if `name` is a preset's.

  Raises:
    errors.UserError: its tokeniser or chat template cannot be used.
  """
  return None if name in presets.PRESETS else huggingface.open_format(name)


def architecture(
  checkpoint: checkpoint_lib.Checkpoint | None,
  name: str,
  *,
  vocabulary_size: int,
) -> model_config.TransformerConfig:
  """What the model is.

  Args:
    checkpoint: see `open_checkpoint`.
    name: of the preset, without checkpoint.
    vocabulary_size: of the environment.

  Raises:
    errors.UserError: a pretrained model has another vocabulary.
  """
  if checkpoint is not None:
    own = checkpoint.config.vocabulary_size
    if own != vocabulary_size:
      raise errors.UserError(
        f'model ({name}) has {own} tokens, and the environment '
        f'{vocabulary_size}: name an environment of text, such as '
        'tool:calculator'
      )
    return checkpoint.config
  return dataclasses.replace(presets.get(name), vocabulary_size=vocabulary_size)


def export(
  directory: pathlib.Path,
  name: str,
  model: model_config.TransformerConfig,
  params: types.Nest,
  *,
  dtype: str,
) -> None:
  """Writes params as a directory that `transformers` loads.

  Args:
    directory: must not hold a model.
    name: of the model that learning began with, whose tokeniser goes with it.
    model: what it is.
    params: whole.
    dtype: of what is written, of `saving.DTYPES`.

  Raises:
    errors.UserError: see `saving.save`.
  """
  checkpoint = open_checkpoint(name)
  base = None if checkpoint is None else checkpoint.description
  saving.save(directory, model, params, dtype=dtype, base=base)
  if checkpoint is not None:
    huggingface.save_files(name, directory)
