"""Turn environments by name, alone and in groups that play the same tasks."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools

from tunix_reverb import errors
from tunix_reverb.environments.tasks import registry
from tunix_reverb.environments.tools import episodes as episodes_lib
from tunix_reverb.environments.tools import task as task_lib
from tunix_reverb.environments.tools import tool_environment
from tunix_reverb.environments.tools import transcript as transcript_lib
from tunix_reverb.text import characters
from tunix_reverb.text import tokeniser

SCHEMES = ('tool', 'reasoning_gym')
# The optional libraries of all of them.
EXTRA = 'agents'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnOptions:
  """What turn environments need to know of the policy that plays them.

  Attributes:
    chat_format: of the policy's model; None for characters (see `characters`).
    limits: of an episode; None for those that suit the task and the format.
    group_size: that many environments in a row play the same instances.
    on_episode: called with an environment's index and each of its episodes
      when it is over, in the thread that steps that environment.
  """

  chat_format: tokeniser.ChatFormat | None = None
  limits: task_lib.Limits | None = None
  group_size: int = 1
  on_episode: Callable[[int, transcript_lib.Transcript], None] | None = None

  def __post_init__(self) -> None:
    if self.group_size < 1:
      raise errors.UserError(f'group_size ({self.group_size}) must be >= 1')


def make(
  name: str,
  *,
  seed: int,
  options: TurnOptions,
  index: int = 0,
  episodes: episodes_lib.Hold | None = None,
) -> tool_environment.ToolEnvironment:
  """Makes the turn environment `name`.

  Args:
    name: with its scheme, such as 'tool:lookup'.
    seed: of the task.
    options: see there.
    index: of the environment, for `on_episode`.
    episodes: see `ToolEnvironment`.

  Raises:
    errors.UserError: there is no such task, or it does not suit the format.
  """
  scheme, _, task_name = name.partition(':')
  on_episode = options.on_episode
  return tool_environment.make(
    registry.make(scheme, task_name),
    chat_format=options.chat_format or characters.CharacterFormat(),
    limits=options.limits,
    seed=seed,
    episodes=episodes,
    on_episode=functools.partial(on_episode, index) if on_episode else None,
  )


def factories(
  name: str,
  *,
  num_environments: int,
  seed: Callable[[int], int],
  options: TurnOptions,
) -> list[Callable[[], tool_environment.ToolEnvironment]]:
  """One callable for each environment, to be called again to replace it.

  Args:
    name: with its scheme.
    num_environments: a multiple of the group's size.
    seed: of the tasks of each group, by its number.
    options: see there.

  Raises:
    errors.UserError: the environments do not make whole groups.
  """
  size = options.group_size
  if num_environments % size:
    raise errors.UserError(
      f'environments_per_actor ({num_environments}) must be a multiple of '
      f'group_size ({size})'
    )

  def factory(index: int) -> Callable[[], tool_environment.ToolEnvironment]:
    episodes = episodes_lib.Episodes()
    return lambda: make(
      name,
      seed=seed(index // size),
      options=options,
      index=index,
      episodes=episodes.hold(),
    )

  return [factory(i) for i in range(num_environments)]
