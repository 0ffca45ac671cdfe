"""Turn environments: what both sides say is one padded array of tokens.

An observation is what the policy has not read yet, since its last turn; an
action is its next turn, the stop token included if it wrote one. Both are i32
arrays that end in padding of -1. FIRST carries the prompt, which ends where
the policy is to write. At termination the observation may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dm_env import specs
import numpy as np

from tunix_reverb import specs as specs_lib

PADDING = -1
OBSERVATION_NAME = 'observation_tokens'
ACTION_NAME = 'turn_tokens'


def observation_spec(
  max_observation_tokens: int, vocabulary_size: int
) -> specs.BoundedArray:
  """i32 [max_observation_tokens]."""
  return _spec(max_observation_tokens, vocabulary_size, OBSERVATION_NAME)


def action_spec(
  max_turn_tokens: int, vocabulary_size: int
) -> specs.BoundedArray:
  """i32 [max_turn_tokens]."""
  return _spec(max_turn_tokens, vocabulary_size, ACTION_NAME)


def _spec(length: int, vocabulary_size: int, name: str) -> specs.BoundedArray:
  return specs.BoundedArray(
    (length,), np.int32, PADDING, vocabulary_size - 1, name=name
  )


def is_turn(spec: Any) -> bool:
  """Whether `spec` is that of a turn environment's actions."""
  return (
    isinstance(spec, specs.BoundedArray)
    and spec.name == ACTION_NAME
    and len(spec.shape) == 1
    and spec.dtype == np.int32
  )


def stored_spec(
  environment_spec: specs_lib.EnvironmentSpec,
) -> specs_lib.EnvironmentSpec:
  """As replay holds its episodes: one token after the other.

  Args:
    environment_spec: of a turn environment.

  Returns:
    Specs whose observation is a token, and whose action is the next one.
  """
  token = specs.DiscreteArray(vocabulary_size(environment_spec.action))
  return environment_spec._replace(
    observation=specs_lib.stored_action_spec(token), action=token
  )


def vocabulary_size(action_spec: specs.BoundedArray) -> int:
  """Of a turn environment."""
  return int(np.max(action_spec.maximum)) + 1


def pack(tokens: Sequence[int], length: int) -> np.ndarray:
  """`tokens` as i32 [length], padded.

  Raises:
    ValueError: there are more than `length`.
  """
  if len(tokens) > length:
    raise ValueError(f'tokens ({len(tokens)}) must be at most {length}')
  array = np.full(length, PADDING, np.int32)
  array[: len(tokens)] = tokens
  return array


def unpack(array: np.ndarray) -> list[int]:
  """The tokens before the padding."""
  tokens = np.asarray(array).tolist()
  return tokens[: tokens.index(PADDING)] if PADDING in tokens else tokens
