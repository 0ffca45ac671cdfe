"""Replay checkpoints on disk: retention, verification, staging. Files only.

Reverb's checkpointer deletes whatever else lies in its directory, keeps one
checkpoint, does not fsync, and cannot fall back from a damaged one. So it gets
a directory of its own, and what it wrote there is hard-linked into ours:

  <directory>/working/               Reverb's own; nothing of value is here
  <directory>/retained/00000007/
    manifest.json                    sizes and checksums, what was served
    <name that Reverb gave it>/      Reverb's files
  <directory>/retained/.incomplete-*  being written; removed at start
  <directory>/discarded-<n>/         what `discard_all` put aside

Only directories named like these are ever touched.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import logging
import os
import pathlib
import re
import shutil
import time
from typing import Any
import zlib

from tunix_reverb import errors
from tunix_reverb.replay import tables

_MANIFEST = 'manifest.json'
_FORMAT = 1
_INCOMPLETE = '.incomplete-'
_SEQUENCE_PATTERN = re.compile(r'\d{8}')
# Reverb names a checkpoint after the moment: '2026-01-31T08:00:00.5+00:00'.
_REVERB_NAME_PATTERN = re.compile(r'\d{4}-\d\d-\d\dT[0-9:.+Z-]+')
_READ_BYTES = 1 << 20


class DamagedCheckpointError(Exception):
  """One retained checkpoint cannot be used; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetainedCheckpoint:
  """A retained checkpoint that its manifest says is whole.

  Attributes:
    path: its directory.
    reverb_name: the directory in it that Reverb wrote.
    files: (bytes, CRC-32) of each of Reverb's files by name.
    description: the trajectory table that was served.
    created_at_s: wall-clock seconds.
  """

  path: pathlib.Path
  reverb_name: str
  files: dict[str, tuple[int, int]]
  description: tables.TableDescription
  created_at_s: float


class CheckpointStore:
  """The checkpoints of one replay server."""

  def __init__(self, directory: pathlib.Path, *, keep: int):
    """Creates the directories and removes what was never completed.

    Args:
      directory: of this server alone; may hold other files.
      keep: newest checkpoints to retain, >= 1.

    Raises:
      errors.CheckpointError: the directory cannot be used, or another server
        uses it.
    """
    if keep < 1:
      raise ValueError(f'keep ({keep}) must be >= 1')
    self.directory = pathlib.Path(directory).absolute()
    self._keep = keep
    self._retained = self.directory / 'retained'
    self.working = self.directory / 'working'
    self._lock = -1
    try:
      self._retained.mkdir(parents=True, exist_ok=True)
      self._lock_directory()
      self.clear_working()
      for path in self._retained.glob(_INCOMPLETE + '*'):
        shutil.rmtree(path)
    except errors.CheckpointError:
      self.close()
      raise
    except OSError as e:
      self.close()
      raise errors.CheckpointError(
        f'replay checkpoint directory ({self.directory}) must be writable: {e}'
      ) from e

  def close(self) -> None:
    """Lets another server use the directory; idempotent."""
    if self._lock >= 0:
      os.close(self._lock)
      self._lock = -1

  def paths(self) -> list[pathlib.Path]:
    """Directories of the retained checkpoints, newest first."""
    return sorted(
      (
        path
        for path in self._retained.iterdir()
        if _SEQUENCE_PATTERN.fullmatch(path.name) and path.is_dir()
      ),
      reverse=True,
    )

  def load(self, path: pathlib.Path) -> RetainedCheckpoint:
    """Reads a retained checkpoint's manifest and verifies its files.

    Raises:
      DamagedCheckpointError: anything about it is not as the manifest says.
    """
    checkpoint = _read_manifest(path)
    data = path / checkpoint.reverb_name
    for name, (size, crc) in checkpoint.files.items():
      try:
        found = (data / name).stat().st_size
        if found != size:
          raise DamagedCheckpointError(
            f'{path}: {name} has {found} bytes instead of {size}'
          )
        if _crc32(data / name) != crc:
          raise DamagedCheckpointError(f'{path}: {name} has a wrong checksum')
      except OSError as e:
        raise DamagedCheckpointError(f'{path}: {name}: {e}') from e
    return checkpoint

  def stage(self, checkpoint: RetainedCheckpoint) -> None:
    """Makes `checkpoint` the only content of Reverb's directory."""
    self.clear_working()
    _link_tree(
      checkpoint.path / checkpoint.reverb_name,
      self.working / checkpoint.reverb_name,
    )

  def clear_working(self) -> None:
    """Empties Reverb's directory.

    Raises:
      errors.CheckpointError: something else lies in it.
    """
    self.working.mkdir(parents=True, exist_ok=True)
    entries = list(self.working.iterdir())
    for path in entries:
      if not _REVERB_NAME_PATTERN.fullmatch(path.name) or not path.is_dir():
        raise errors.CheckpointError(
          f'{path} must not exist: Reverb deletes what else lies in the '
          'directory of its checkpoints; move it away'
        )
    for path in entries:
      shutil.rmtree(path)

  def retain(
    self, source: pathlib.Path, description: tables.TableDescription
  ) -> pathlib.Path:
    """Keeps what Reverb wrote at `source`, and the newest `keep` in all.

    Everything is on disk before the rename that makes it count.

    Args:
      source: a complete checkpoint in `working`.
      description: the trajectory table that is served.

    Returns:
      Where it is retained.

    Raises:
      OSError: it could not be written; what was retained before is untouched.
    """
    newest = self.paths()
    sequence = int(newest[0].name) + 1 if newest else 1
    target = self._retained / f'{sequence:08d}'
    incomplete = self._retained / f'{_INCOMPLETE}{sequence:08d}'
    try:
      incomplete.mkdir()
      _link_tree(source, incomplete / source.name)
      manifest = {
        'format': _FORMAT,
        'created_at_s': time.time(),
        'reverb_name': source.name,
        'files': {
          path.name: [path.stat().st_size, _crc32(path)]
          for path in sorted(source.iterdir())
        },
        'table': description.to_json(),
      }
      (incomplete / _MANIFEST).write_text(json.dumps(manifest, indent=2))
      for path in (
        *(incomplete / source.name).iterdir(),
        incomplete / source.name,
        incomplete / _MANIFEST,
        incomplete,
      ):
        _fsync(path)
      incomplete.rename(target)
      _fsync(self._retained)
    except BaseException:
      shutil.rmtree(incomplete, ignore_errors=True)
      raise
    for path in self.paths()[self._keep :]:
      shutil.rmtree(path, ignore_errors=True)
    return target

  def remove_incomplete(self) -> None:
    """Frees the space of what Reverb began to write and did not complete."""
    for path in self.working.iterdir():
      if (
        _REVERB_NAME_PATTERN.fullmatch(path.name)
        and not (path / 'DONE').exists()
      ):
        shutil.rmtree(path, ignore_errors=True)

  def _lock_directory(self) -> None:
    """Two servers in one directory would delete each other's files."""
    self._lock = os.open(self.directory, os.O_RDONLY)
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      self.close()
      raise errors.CheckpointError(
        f'replay checkpoint directory ({self.directory}) must be of one server '
        'alone, and another one uses it; end that one or name another directory'
      ) from e
    except OSError as e:
      # Some network file systems lock no directories.
      logging.warning('%s could not be locked: %s', self.directory, e)

  def discard_all(self) -> pathlib.Path | None:
    """Puts all retained checkpoints aside. Returns where, None if none were."""
    if not self.paths():
      return None
    number = 1
    while (self.directory / f'discarded-{number}').exists():
      number += 1
    target = self.directory / f'discarded-{number}'
    self._retained.rename(target)
    self._retained.mkdir()
    return target


def data_directory(path: pathlib.Path) -> pathlib.Path:
  """Where Reverb's files of the retained checkpoint at `path` are.

  Raises:
    DamagedCheckpointError: its manifest is unreadable.
  """
  return path / _read_manifest(path).reverb_name


def _read_manifest(path: pathlib.Path) -> RetainedCheckpoint:
  try:
    manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text())
    if manifest['format'] != _FORMAT:
      raise DamagedCheckpointError(
        f'{path}: format {manifest["format"]} must be {_FORMAT}'
      )
    return RetainedCheckpoint(
      path=path,
      reverb_name=pathlib.PurePath(manifest['reverb_name']).name,
      files={
        pathlib.PurePath(name).name: (int(size), int(crc))
        for name, (size, crc) in manifest['files'].items()
      },
      description=tables.TableDescription.from_json(manifest['table']),
      created_at_s=float(manifest['created_at_s']),
    )
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
    raise DamagedCheckpointError(
      f'{path}: {_MANIFEST} is unreadable: {type(e).__name__} {e}'
    ) from e


def _link_tree(source: pathlib.Path, target: pathlib.Path) -> None:
  """Hard-links the files of `source` into the new directory `target`.

  File systems without hard links get copies.
  """
  target.mkdir()
  for path in source.iterdir():
    try:
      os.link(path, target / path.name)
    except OSError as e:
      if e.errno not in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.ENOSYS):
        raise
      shutil.copy2(path, target / path.name)


def _crc32(path: pathlib.Path) -> int:
  crc = 0
  with open(path, 'rb') as file:
    while block := file.read(_READ_BYTES):
      crc = zlib.crc32(block, crc)
  return crc


def _fsync(path: pathlib.Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
