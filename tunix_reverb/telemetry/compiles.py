"""Counts XLA compilations: one after warm-up is a defect."""

from __future__ import annotations

import threading
from typing import Any

import jax

# '/jax/core/compile/backend_compile_duration' in jax 0.4 and later; earlier
# and future versions may differ in what precedes it.
_EVENT_SUFFIX = 'backend_compile_duration'


class CompileCounter:
  """Counts the compilations of this process from construction on."""

  def __init__(self) -> None:
    self._lock = threading.Lock()  # JAX compiles in whichever thread calls.
    self._compiles = 0
    self._warm_compiles = 0
    self._compile_s = 0.0
    self._warm = False
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def mark_warm(self) -> None:
    """Says that everything has been compiled: any further one counts."""
    with self._lock:
      self._warm = True
      self._warm_compiles = self._compiles

  @property
  def compiles(self) -> int:
    """Compilations so far."""
    return self._compiles

  @property
  def recompiles(self) -> int:
    """Compilations since `mark_warm`; 0 before it."""
    with self._lock:
      return self._compiles - self._warm_compiles if self._warm else 0

  @property
  def compile_s(self) -> float:
    """Seconds spent compiling so far, over all threads."""
    return self._compile_s

  def _listen(self, event: str, duration_s: float, **_: Any) -> None:
    if event.endswith(_EVENT_SUFFIX):
      with self._lock:
        self._compiles += 1
        self._compile_s += duration_s
