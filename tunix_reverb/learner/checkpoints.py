"""Learner checkpoints: written in the background, verified when read.

One directory per checkpoint, named by its learner step, written by Orbax (which
makes it appear by a rename) and sealed by a list of checksums of all its files.
Only a sealed checkpoint whose files still match is ever loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
import json
import logging
import os
import pathlib
import shutil
import threading
from typing import Any
import zlib

import jax

from tunix_reverb import errors
from tunix_reverb import types

_SEAL = 'checksums.json'
_LEAVES = 'leaves.json'
_TMP_MARK = '.orbax-checkpoint-tmp'
_READ_BYTES = 1 << 22
# For the last writes of other processes, once the first one has sealed all.
_OTHERS_DEADLINE_S = 10.0

Metadata = Mapping[str, Any]


class LearnerCheckpointer:
  """Saves and restores learner states under one local directory.

  One writer per directory. Not thread-safe: one thread calls it. Of several JAX
  processes all must call the same methods: each writes and reads its own parts
  of the arrays, and the first one does the rest.
  """

  def __init__(self, directory: str | os.PathLike[str], *, max_to_keep: int):
    """Reads nothing yet; `save` creates the directory.

    Args:
      directory: holds nothing but checkpoints.
      max_to_keep: newest complete checkpoints kept on disk.
    """
    if max_to_keep < 1:
      raise ValueError(f'max_to_keep ({max_to_keep}) must be >= 1')
    self._directory = pathlib.Path(directory).absolute()
    self._max_to_keep = max_to_keep
    self._is_first = jax.process_index() == 0
    # Imported here: a tenth of a role's start, for those that save or load.
    import orbax.checkpoint as ocp

    self._ocp = ocp
    self._checkpointer = ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler('state', 'metadata')
    )
    self._thread: threading.Thread | None = None
    self._failure: Exception | None = None
    self._saving: pathlib.Path | None = None
    self._damaged: set[int] = set()

  def save(self, step: int, state: types.Nest, metadata: Metadata) -> bool:
    """Starts to save; returns once the state may be donated or changed.

    Args:
      step: the learner step, names the checkpoint.
      state: pytree of arrays.
      metadata: whatever JSON holds, restored beside the state.

    Returns:
      Whether a save was started: False while another is being written, or if
      this step is already saved.

    Raises:
      errors.CheckpointError: the save before this one failed (this one was not
        started), or this one failed at once. Training can go on, and the next
        call tries anew.
    """
    self.check()
    if self._thread is not None and not self._is_first:
      # The first process is through with it, or it would not save again.
      self._thread.join(_OTHERS_DEADLINE_S)
    if self.is_saving:
      return False
    path = self._directory / str(step)
    if (path / _SEAL).exists() and step not in self._damaged:
      return False
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      self._checkpointer.save(
        path,
        args=self._ocp.args.Composite(
          state=self._ocp.args.StandardSave(state),
          metadata=self._ocp.args.JsonSave(dict(metadata)),
        ),
        force=True,
      )
    except Exception as e:
      self._remove_incomplete()
      raise self._write_error(path, e) from e
    self._damaged.discard(step)
    self._saving = path
    self._thread = threading.Thread(
      target=self._finish,
      args=(path, _leaves(state)),
      name='checkpoint_seal',
      daemon=True,
    )
    self._thread.start()
    return True

  @property
  def is_saving(self) -> bool:
    """Whether a checkpoint is being written."""
    return self._thread is not None and self._thread.is_alive()

  def check(self) -> None:
    """Raises `errors.CheckpointError`, once, if a background save failed."""
    if self._failure is not None:
      failure, self._failure = self._failure, None
      raise self._write_error(self._saving, failure) from failure

  def wait(self, timeout_s: float) -> None:
    """Waits until the save in progress, if any, is complete.

    Raises:
      errors.DeadlineExceededError: it takes longer than `timeout_s`.
      errors.CheckpointError: it failed.
    """
    if self._thread is not None:
      self._thread.join(timeout_s)
      if self._thread.is_alive():
        raise errors.DeadlineExceededError(
          f'checkpointer waited {timeout_s:g} s for {self._saving} to be '
          'written; the disk is slower than this or hangs'
        )
    self.check()

  def close(self, timeout_s: float) -> None:
    """Waits like `wait`, then ends the background threads."""
    self.wait(timeout_s)
    self._checkpointer.close()

  def steps(self) -> list[int]:
    """Learner steps of the complete checkpoints on disk, ascending."""
    return [s for s in self._all_steps() if (self._path(s) / _SEAL).exists()]

  def latest_metadata(self) -> Metadata:
    """The metadata alone, of the newest checkpoint that can be loaded.

    Raises:
      errors.CheckpointError: there is none.
    """
    return self._newest(self._restore_metadata)

  def restore_latest(self, template: types.Nest) -> tuple[types.Nest, Metadata]:
    """Loads the newest checkpoint, or the one before if that is damaged.

    Args:
      template: pytree of arrays or of `jax.ShapeDtypeStruct` with `sharding`;
        says the structure and where each leaf goes.

    Returns:
      (state, metadata), bit for bit what was saved.

    Raises:
      errors.CheckpointError: there is none that can be loaded; names every one
        that was tried, and why it was not.
    """
    template = jax.tree_util.tree_map(
      self._ocp.utils.to_shape_dtype_struct, template
    )

    def restore(path: pathlib.Path) -> tuple[types.Nest, Metadata]:
      _check_leaves(path, template)
      restored = self._checkpointer.restore(
        path,
        args=self._ocp.args.Composite(
          state=self._ocp.args.StandardRestore(template)
        ),
      )
      return restored['state'], self._restore_metadata(path)

    return self._newest(restore)

  def _restore_metadata(self, path: pathlib.Path) -> Metadata:
    return self._checkpointer.restore(
      path, args=self._ocp.args.Composite(metadata=self._ocp.args.JsonRestore())
    )['metadata']

  def _newest(self, load: Callable[[pathlib.Path], Any]) -> Any:
    """load(path) of the newest checkpoint for which it works."""
    reasons = []
    for step in reversed(self._all_steps()):
      path = self._path(step)
      try:
        _verify(path)
        result = load(path)
      # Orbax and TensorStore raise almost any type for a damaged file.
      except Exception as e:  # pylint: disable=broad-exception-caught
        self._damaged.add(step)
        reasons.append(f'{step} ({_one_line(e)})')
        continue
      if reasons:
        logging.getLogger(__name__).warning(
          'Fell back to checkpoint %s; not loadable: %s',
          path,
          '; '.join(reasons),
        )
      return result
    if not reasons:
      raise errors.CheckpointError(
        f'no checkpoint in {self._directory}; name the directory that a '
        'learner has saved to'
      )
    raise errors.CheckpointError(
      f'no checkpoint in {self._directory} can be loaded; tried '
      + '; '.join(reasons)
    )

  def _finish(self, path: pathlib.Path, leaves: Mapping[str, str]) -> None:
    """Background thread: waits for the files, seals them, tidies up."""
    try:
      self._checkpointer.wait_until_finished()
      if not self._is_first:
        return
      (path / _LEAVES).write_text(json.dumps(leaves), encoding='utf-8')
      _seal(path)
      self._prune()
    # Told by `check`, `save` or `wait`: a full disk must not end the training.
    except Exception as e:  # pylint: disable=broad-exception-caught
      self._remove_incomplete()
      self._failure = e

  def _prune(self) -> None:
    """Removes what is damaged, incomplete or beyond `max_to_keep`."""
    self._remove_incomplete()
    for step in self._damaged:
      shutil.rmtree(self._path(step), ignore_errors=True)
    for step in self.steps()[: -self._max_to_keep]:
      # Unsealed first: one removed by half is never taken for complete.
      (self._path(step) / _SEAL).unlink(missing_ok=True)
      shutil.rmtree(self._path(step), ignore_errors=True)

  def _remove_incomplete(self) -> None:
    """Removes what interrupted saves left; call while none is running."""
    if not self._is_first or not self._directory.is_dir():
      return
    for path in self._directory.iterdir():
      name = path.name
      is_tmp = _TMP_MARK in name and name.split('.')[0].isdigit()
      if is_tmp or (name.isdigit() and not (path / _SEAL).exists()):
        shutil.rmtree(path, ignore_errors=True)

  def _all_steps(self) -> list[int]:
    """Every finished directory, sealed or not."""
    if not self._directory.is_dir():
      return []
    return sorted(
      int(p.name) for p in self._directory.iterdir() if p.name.isdigit()
    )

  def _path(self, step: int) -> pathlib.Path:
    return self._directory / str(step)

  def _write_error(
    self, path: pathlib.Path | None, cause: Exception
  ) -> errors.CheckpointError:
    steps = self.steps()
    return errors.CheckpointError(
      f'checkpoint {path} could not be written: {_one_line(cause)}; free '
      'space or make the directory writable. The newest complete checkpoint '
      f'is {steps[-1] if steps else "none"}'
    )


def _leaves(state: types.Nest) -> dict[str, str]:
  """Path of each leaf -> its global shape and dtype."""
  return {
    jax.tree_util.keystr(path): f'{x.dtype}{list(x.shape)}'
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
  }


def _check_leaves(path: pathlib.Path, template: types.Nest) -> None:
  """Raises `ValueError` unless the state of a checkpoint fits the template.

  Before Orbax sees it, whose reads under way outlive a refusal of its own.
  """
  saved = json.loads((path / _LEAVES).read_text(encoding='utf-8'))
  wanted = _leaves(template)
  differences = [
    f'{name}: {saved.get(name, "none")} saved, '
    f'{wanted.get(name, "none")} wanted'
    for name in sorted(saved.keys() | wanted.keys())
    if saved.get(name) != wanted.get(name)
  ]
  if differences:
    raise ValueError(
      f'{len(differences)} arrays differ from those of this run, among them '
      + '; '.join(differences[:3])
    )


def _seal(path: pathlib.Path) -> None:
  """Writes sizes and checksums of all files of a finished checkpoint."""
  sums = {
    str(p.relative_to(path)): [p.stat().st_size, _crc32(p)]
    for p in sorted(path.rglob('*'))
    if p.is_file()
  }
  tmp = path / f'{_SEAL}.tmp'
  with open(tmp, 'w', encoding='utf-8') as f:
    json.dump(sums, f)
    f.flush()
    os.fsync(f.fileno())
  os.replace(tmp, path / _SEAL)


def _verify(path: pathlib.Path) -> None:
  """Raises `ValueError` unless every sealed file is what it was."""
  try:
    sums = json.loads((path / _SEAL).read_text(encoding='utf-8'))
  except FileNotFoundError as e:
    raise ValueError(f'incomplete: it has no {_SEAL}') from e
  for name, (size, crc32) in sums.items():
    file = path / name
    if not file.is_file():
      raise ValueError(f'{name} is absent')
    if file.stat().st_size != size:
      raise ValueError(
        f'{name} has {file.stat().st_size} bytes instead of {size}'
      )
    if _crc32(file) != crc32:
      raise ValueError(f'the checksum of {name} differs')


def _crc32(path: pathlib.Path) -> int:
  value = 0
  with open(path, 'rb') as f:
    while chunk := f.read(_READ_BYTES):
      value = zlib.crc32(chunk, value)
  return value


def _one_line(e: Exception) -> str:
  """The start of an error's text; those of Orbax and TensorStore are long."""
  text = ' '.join(str(e).split()) or type(e).__name__
  if 'No space left on device' in text:
    return 'no space left on the device'
  return text if len(text) <= 300 else text[:297] + '...'
