"""Atari 2600 games with the preprocessing of Mnih et al. 2015.

Through ale-py and Gymnasium's `AtariPreprocessing`: each action is repeated
for 4 frames, the last two are max-pooled, turned to greyscale and resized to
84 x 84; the last 4 results are stacked. An episode starts with 1 to 30 no-ops
and is truncated after 108,000 frames (30 minutes). The action set is the
game's minimal one; losing a life ends nothing; rewards are the game's own
score (the learner clips).

Versions, as Gymnasium numbers them: `Pong` and `Pong-v4` repeat nothing (the
protocol of DQN and IMPALA); `Pong-v5` has sticky actions: with probability
0.25 the emulator repeats the previous action (Machado et al. 2018,
arXiv:1709.06009).
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import dm_env
from dm_env import specs
import numpy as np

from tunix_reverb import errors
from tunix_reverb.environments import gym_adapter

MAX_EPISODE_FRAMES = 108_000
STACKED_FRAMES = 4
SCREEN_SIZE = 84
_STICKY_PROBABILITY = {None: 0.0, 'v4': 0.0, 'v5': 0.25}


def make(game: str, *, seed: int) -> dm_env.Environment:
  """Makes `game`, such as `Pong`, `ms_pacman` or `Breakout-v5`.

  Raises:
    ImportError: ale-py, Gymnasium or OpenCV is not installed.
    errors.UserError: no such game or version.
  """
  import ale_py
  import cv2  # Needed by AtariPreprocessing, which says so only later.
  from gymnasium import wrappers

  del cv2
  rom, version = _parse(game)
  # Before the first emulator exists, or it prints its banner.
  ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
  environment = ale_py.AtariEnv(
    rom,
    # Greyscale is what AtariPreprocessing reads; RGB would be a second copy.
    obs_type='grayscale',
    frameskip=1,
    repeat_action_probability=_STICKY_PROBABILITY[version],
    max_num_frames_per_episode=MAX_EPISODE_FRAMES,
  )
  environment = wrappers.AtariPreprocessing(
    environment, noop_max=30, frame_skip=4, screen_size=SCREEN_SIZE
  )
  return StackFrames(gym_adapter.GymEnvironment(environment, seed=seed))


def _parse(game: str) -> tuple[str, str | None]:
  """Splits `MsPacman-v5` into ale-py's ROM id and the version."""
  from ale_py import roms

  name, _, version = game.partition('-')
  rom = re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower()
  known = roms.get_all_rom_ids()
  if rom not in known:
    close = difflib.get_close_matches(rom, known, n=3) or sorted(known)[:8]
    raise errors.UserError(
      f'atari game ({name!r}) must be one of the {len(known)} in ale-py, '
      f'such as {", ".join(close)}'
    )
  if (version or None) not in _STICKY_PROBABILITY:
    raise errors.UserError(
      f'atari version ({version!r}) must be v4 (no sticky actions) or v5 '
      '(sticky actions with probability 0.25)'
    )
  return rom, version or None


class StackFrames(dm_env.Environment):
  """Stacks the last 4 observations [84, 84] as uint8 [84, 84, 4], newest last.

  At FIRST the one frame there is fills the stack.
  """

  def __init__(self, environment: gym_adapter.GymEnvironment):
    """Args: environment: one that observes uint8 [84, 84]."""
    self._environment = environment
    self._needs_reset = True
    self._stack: np.ndarray | None = None

  def reset(self) -> dm_env.TimeStep:
    self._needs_reset = False
    timestep = self._environment.reset()
    self._stack = np.repeat(timestep.observation[..., None], STACKED_FRAMES, -1)
    return timestep._replace(observation=self._stack)

  def step(self, action: Any) -> dm_env.TimeStep:
    if self._needs_reset:
      return self.reset()
    step_type, reward, discount, observation = self.step_raw(action)
    return dm_env.TimeStep(
      step_type, np.float32(reward), np.float32(discount), observation
    )

  def step_raw(self, action: Any) -> tuple:
    """Steps a running episode; see `canonical`."""
    step_type, reward, discount, frame = self._environment.step_raw(action)
    stack = np.empty_like(self._stack)
    stack[..., :-1] = self._stack[..., 1:]
    stack[..., -1] = frame
    self._stack = stack
    self._needs_reset = step_type is dm_env.StepType.LAST
    return step_type, reward, discount, stack

  def observation_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray(
      (SCREEN_SIZE, SCREEN_SIZE, STACKED_FRAMES),
      np.uint8,
      0,
      255,
      name='frames',
    )

  def action_spec(self) -> specs.Array:
    return self._environment.action_spec()

  def reward_spec(self) -> specs.Array:
    return self._environment.reward_spec()

  def discount_spec(self) -> specs.BoundedArray:
    return self._environment.discount_spec()

  def close(self) -> None:
    self._environment.close()
