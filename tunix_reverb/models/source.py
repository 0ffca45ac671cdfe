"""Where the numbers of a checkpoint come from, whatever its file format."""

from __future__ import annotations

import abc
from collections.abc import Iterable

import numpy as np

Index = tuple[slice, ...]


class TensorSource(abc.ABC):
  """The tensors of one checkpoint, by their names at Hugging Face.

  Reading touches what is asked for and no more: files are mapped into memory,
  and quantised tensors are decoded row by row.
  """

  @abc.abstractmethod
  def names(self) -> Iterable[str]:
    """Of all tensors."""

  @abc.abstractmethod
  def shape(self, name: str) -> tuple[int, ...]:
    """Of a tensor that there is."""

  @abc.abstractmethod
  def read(self, name: str, index: Index) -> np.ndarray:
    """A part of a tensor, of its shape and of a float dtype.

    Args:
      name: of a tensor that there is.
      index: a slice for each dim, of step 1.
    """
