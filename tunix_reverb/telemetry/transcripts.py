"""Transcripts of evaluation episodes, as they are written and read.

A line of `<run_dir>/transcripts.jsonl` is one episode: what
`environments.tools.transcript.Transcript` holds (messages, each turn's tokens,
text, tool calls with their times, and rewards, the outcome) and the
`policy_version` that played it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import json
import pathlib
import time
from typing import Any

FILE = 'transcripts.jsonl'
# Of one evaluation; the others played alike.
_KEPT = 8
_MAX_CHARACTERS = 160


def write(
  run_dir: pathlib.Path | None,
  transcripts: Sequence[Mapping[str, Any]],
  policy_version: int,
) -> None:
  """Appends the first few of an evaluation's episodes.

  Args:
    run_dir: the run directory; None keeps none.
    transcripts: values for JSON.
    policy_version: of the variables that played them.
  """
  if run_dir is None or not transcripts:
    return
  with (run_dir / FILE).open('a', encoding='utf-8') as file:
    for transcript in transcripts[:_KEPT]:
      row = {'policy_version': policy_version, **transcript}
      file.write(json.dumps(row, ensure_ascii=False) + '\n')


def read(run_dir: pathlib.Path) -> list[dict[str, Any]]:
  """All episodes of a run, in the order in which they were played.

  What a crash has cut off is left out.
  """
  path = run_dir / FILE
  if not path.exists():
    return []
  rows = []
  for line in path.read_text(encoding='utf-8').splitlines():
    try:
      rows.append(json.loads(line))
    except ValueError:
      continue
  return rows


class Follower:
  """Shows an episode now and then while they are being written."""

  def __init__(self, run_dir: pathlib.Path, *, period_s: float = 20.0):
    """Args: run_dir: of the run; period_s: seconds from one to the next."""
    self._path = run_dir / FILE
    self._period_s = period_s
    self._next_s = 0.0
    self._offset = self._path.stat().st_size if self._path.exists() else 0

  def poll(self) -> str:
    """The text of a new episode, if it is time for one; else ''."""
    if time.monotonic() < self._next_s or not self._path.exists():
      return ''
    with self._path.open('rb') as file:
      file.seek(self._offset)
      complete = file.read().rpartition(b'\n')[0]
    if not complete:
      return ''
    self._offset += len(complete) + 1
    self._next_s = time.monotonic() + self._period_s
    return render(json.loads(complete.rpartition(b'\n')[2]))


def render(transcript: Mapping[str, Any], *, with_tokens: bool = False) -> str:
  """An episode as people read it, a line for each message.

  Args:
    transcript: a row of the file.
    with_tokens: shows the tokens of each turn of the policy after its text.
  """
  score = transcript['score']
  lines = [
    f'episode of version {transcript["policy_version"]}: '
    f'{transcript["outcome"]}, reward {transcript["total_reward"]:.3g}'
    + ('' if score is None else f', score {score:.3g}')
  ]
  calls = itertools.chain(*(turn['calls'] for turn in transcript['turns']))
  texts = (
    turn['text'] + (f'   {turn["tokens"]}' if with_tokens else '')
    for turn in transcript['turns']
  )
  for message in transcript['messages']:
    if message['role'] == 'system':
      continue
    lines.append('    ' + _line(message, texts, calls))
  return '\n'.join(lines)


def _line(
  message: Mapping[str, Any],
  texts: Iterator[str],
  calls: Iterator[Mapping[str, Any]],
) -> str:
  role, content = message['role'], str(message['content'])
  if role == 'assistant':
    role, content = 'policy', next(texts, content)
  elif role == 'tool' and message.get('name') != 'error':
    call = next(calls, {})
    took_ms = 1e3 * call.get('duration_s', 0.0)
    role = f'tool {message.get("name", "")} ({took_ms:.1f} ms)'
  content = content.replace('\n', '\\n')
  if len(content) > _MAX_CHARACTERS:
    content = content[:_MAX_CHARACTERS] + ' ...'
  return f'{role}: {content}'
