"""Groups of episodes that play the same task, and what they say of each other.

The members of a group begin together, under one permit, and become one item
when the last of them has ended: so they are learnt together, and their rewards
can be compared. A group of one is an episode by itself. Nobody waits for a
member whose environment failed: it has left, and is back for the next task.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import recorder as recorder_lib

NONE, GRPO, RLOO = ADVANTAGES = ('none', 'grpo', 'rloo')
_EPSILON = 1e-6


def advantages(returns: Sequence[float], kind: str) -> np.ndarray:
  """What each member did better than the group.

  GRPO (Shao et al. 2024, arXiv:2402.03300) takes the distance to the mean in
  standard deviations, RLOO (Ahmadian et al. 2024, arXiv:2402.14740) the
  distance to the mean of the others.

  Args:
    returns: of the G members, at least two.
    kind: 'grpo' or 'rloo'.

  Returns:
    f32 [G].
  """
  returns = np.asarray(returns, np.float64)
  distance = returns - returns.mean()
  if kind == GRPO:
    result = distance / (returns.std() + _EPSILON)
  elif kind == RLOO:
    result = distance * returns.size / (returns.size - 1)
  else:
    raise ValueError(f'kind ({kind!r}) must be {GRPO} or {RLOO}')
  return result.astype(np.float32)


class Group:
  """G environments of one actor, from one permit to the next.

  Attributes:
    members: ids of the environments.
    permit_id: of the episodes under way, or of the next ones; None without.
    playing: the episodes under way, by environment.
    prompts: of the episodes to come, by environment.
  """

  def __init__(self, members: Sequence[int], advantage: str = NONE):
    """Args: members: ids of the environments; advantage: of `ADVANTAGES`."""
    self.members = tuple(members)
    self.permit_id: int | None = None
    self.playing: dict[int, recorder_lib.Recorder] = {}
    self.prompts: dict[int, list[int]] = {}
    self._advantage = advantage
    self._ended: list[tuple[float, types.Trajectories]] = []

  @property
  def is_complete(self) -> bool:
    """Whether nobody plays, and everybody is there for the next task."""
    return not self.playing and len(self.prompts) == len(self.members)

  def end(self, member: int, discount: float) -> None:
    """The episode of `member` has ended."""
    recorder = self.playing.pop(member)
    trajectory = recorder.finish(discount)
    self._ended.append((recorder.total_reward, trajectory))

  def leave(self, member: int) -> None:
    """The episode of `member`, if it plays one, is lost."""
    self.playing.pop(member, None)

  def take(self) -> types.Trajectories | None:
    """What the group has played, once nobody plays any more.

    The permit goes with it. Where too few have ended to compare, they are lost
    and the permit is left for the next task.
    """
    if self.playing or not self._ended:
      return None
    ended, self._ended = self._ended, []
    trajectories = specs.join([trajectory for _, trajectory in ended])
    if self._advantage != NONE:
      if len(ended) < 2:
        return None
      of_each = advantages([r for r, _ in ended], self._advantage)
      trajectories = trajectories._replace(
        advantage=np.repeat(of_each, trajectories.lengths)
      )
    # An item has one permit: its first trajectory's.
    trajectories.permit_id[0] = self.permit_id
    self.permit_id = None
    return trajectories
