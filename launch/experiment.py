"""One run under `launch.local`: its directory, its processes, its end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import sys
import threading
import time
from typing import Any
from typing import IO

from launch import columns as columns_lib
from launch import group as group_lib
from launch import interpreters as interpreters_lib
from launch import supervisor as supervisor_lib
from launch import topology
from tunix_reverb import errors
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents import flat
from tunix_reverb.agents.transformer import config as transformer_config
from tunix_reverb.telemetry import console as console_lib
from tunix_reverb.telemetry import metrics
from tunix_reverb.telemetry import milestones
from tunix_reverb.telemetry import reader as reader_lib
from tunix_reverb.telemetry import run_state
from tunix_reverb.telemetry import summary as summary_lib
from tunix_reverb.telemetry import transcripts

# Signals, the kill of what ignores them and the summary fit into 10 seconds.
_STOP_DEADLINE_S = 9.2
_POLL_PERIOD_S = 0.1


def default_run_dir(environment: str) -> pathlib.Path:
  """`runs/<environment>-<time>`."""
  name = re.sub(r'[^\w.-]+', '_', environment)
  return pathlib.Path('runs') / f'{name}-{time.strftime("%Y%m%d-%H%M%S")}'


def prepare_run_dir(
  run_dir: pathlib.Path, config: config_lib.ExperimentConfig, *, resume: bool
) -> IO[str]:
  """Creates (or reopens) the run directory and writes its config.

  Returns:
    The open lock file that keeps a second run out of the directory.

  Raises:
    errors.UserError: it holds a run and `resume` is not set, or the other way
      round; it is in use; it cannot be written.
  """
  held = (run_dir / 'config.json').exists()
  if held and not resume:
    raise errors.UserError(
      f'run_dir ({str(run_dir)!r}) must not hold a run already; continue it '
      'with --resume or name another directory'
    )
  if resume and not held:
    raise errors.UserError(
      f'run_dir ({str(run_dir)!r}) must hold a run to resume, with its '
      'config.json'
    )
  try:
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / '.lock').open('w')
  except OSError as e:
    raise _unwritable(run_dir, e) from e
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    topology.write_atomically(run_dir / 'config.json', flat.dumps(config))
  except BlockingIOError as e:
    lock.close()
    raise errors.UserError(
      f'run_dir ({str(run_dir)!r}) must not be in use by another run'
    ) from e
  except OSError as e:
    lock.close()
    raise _unwritable(run_dir, e) from e
  return lock


def _unwritable(run_dir: pathlib.Path, error: OSError) -> errors.UserError:
  return errors.UserError(
    f'run_dir ({str(run_dir)!r}) must be a writable directory: {error.strerror}'
  )


def give_up_run_dir(run_dir: pathlib.Path, *, is_new: bool) -> None:
  """Lets the same command be given again, once the mistake is mended.

  Args:
    run_dir: of a run that a user's mistake ended before it learnt anything.
    is_new: whether the run made the directory; then it goes as a whole.
  """
  if is_new:
    shutil.rmtree(run_dir, ignore_errors=True)
    print(f'{run_dir} held nothing to resume from and is removed', flush=True)
  else:
    (run_dir / 'config.json').unlink(missing_ok=True)


def has_begun(run_dir: pathlib.Path) -> bool:
  """Whether the learner has left anything: a checkpoint or a report."""
  report = run_dir / 'metrics' / f'{metrics.LEARNER}.jsonl'
  return report.exists() or has_checkpoint(run_dir)


def has_checkpoint(run_dir: pathlib.Path) -> bool:
  """Whether the learner has left a checkpoint."""
  directory = run_dir / 'checkpoints' / 'learner'
  return directory.is_dir() and any(directory.iterdir())


def make_specs(
  config: config_lib.ExperimentConfig,
  run_dir: pathlib.Path,
  ports: Sequence[int],
  *,
  coordinator_port: int = 0,
  interpreters: Mapping[str, Sequence[str]] | None = None,
  columns_file: bool = False,
  replay_restore: str = 'auto',
) -> list[supervisor_lib.ProcessSpec]:
  """The table of processes of one run.

  Args:
    config: of the run.
    run_dir: of the run.
    ports: one per replay server.
    coordinator_port: of the first of several learner processes.
    interpreters: by kind of role, how to start Python; None for this one.
    columns_file: whether the servers ask the learner instead of the environment
      for their columns.
    replay_restore: of the servers' first start; a restart always goes on from
      the latest checkpoint.
  """
  servers = '--replay_servers=' + ','.join(f'localhost:{p}' for p in ports)
  this = interpreters_lib.command(sys.executable)

  def command(role: str, *flags: str, binary: str = '') -> list[str]:
    return [
      *(interpreters or {}).get(role, this),
      '-m',
      f'launch.{binary or role}',
      f'--run_dir={run_dir}',
      '--supervised',
      *flags,
    ]

  columns: list[str] = []
  if columns_file:
    columns.append(f'--columns_file={run_dir / columns_lib.FILE}')
  specs = []
  for i, port in enumerate(ports):
    restart = command(
      metrics.REPLAY_SERVER, f'--server_index={i}', f'--port={port}', *columns
    )
    specs.append(
      supervisor_lib.ProcessSpec(
        name=f'{metrics.REPLAY_SERVER}_{i}',
        command=[*restart, f'--replay_restore={replay_restore}'],
        restart_command=restart,
        restart=True,
        saves=True,
        stop_last=True,
      )
    )
  learner = command(metrics.LEARNER, servers)
  specs += _learner_specs(config.mesh.num_learners, learner, coordinator_port)
  is_outside = config.environment == transformer_config.OUTSIDE
  binary = 'endpoint' if is_outside else ''
  specs += [
    supervisor_lib.ProcessSpec(
      name=f'{metrics.ACTOR}_{i}',
      command=command(metrics.ACTOR, f'--actor_id={i}', servers, binary=binary),
      restart=True,
    )
    for i in range(config.actor.num_actors)
  ]
  if config.evaluation.evaluation_period_s > 0 and not is_outside:
    specs.append(
      supervisor_lib.ProcessSpec(
        name=metrics.EVALUATOR,
        command=command(metrics.EVALUATOR, servers),
        restart=True,
      )
    )
  return specs


def _learner_specs(
  count: int, command: Sequence[str], coordinator_port: int
) -> list[supervisor_lib.ProcessSpec]:
  """One learner process, or several that are restarted together.

  The death of a single learner ends the run, as what caused it would most
  often cause it again. Several may be on as many machines, each of which may
  fail: there the newest checkpoint is worth a try.
  """
  flags = lambda i: (
    f'--learner_index={i}',
    f'--coordinator_address=localhost:{coordinator_port}',
  )
  return [
    supervisor_lib.ProcessSpec(
      name=group_lib.role_name(i),
      command=[*command, *(flags(i) if count > 1 else ())],
      restart=count > 1,
      group=metrics.LEARNER if count > 1 else '',
      saves=True,
      completes=True,
    )
    for i in range(count)
  ]


class SolvedCheck:
  """Decides when a run is solved: reached, held, and reached again.

  The evaluation that decides is the first one to end after `hold_s`; if it
  falls short, the run goes on as if the threshold had not been reached.
  """

  def __init__(self, solved_return: float, hold_s: float):
    self._solved_return = solved_return
    self._hold_s = hold_s
    self._reached_s: float | None = None
    self._seen_s = -math.inf

  def update(self, evaluations: Sequence[run_state.Evaluation]) -> bool:
    """Takes in evaluations, old and new; returns whether it is solved."""
    for evaluation in evaluations:
      if evaluation.time_s <= self._seen_s:
        continue
      self._seen_s = evaluation.time_s
      good = evaluation.return_mean >= self._solved_return
      if self._reached_s is None and good:
        self._reached_s = evaluation.time_s
      if self._reached_s is None:
        continue
      if evaluation.time_s - self._reached_s >= self._hold_s:
        if good:
          return True
        self._reached_s = None
    return False


class Progress:
  """Tells from new rows of metrics which processes do useful work.

  A row is enough, but for a replay server: it reports from the moment it
  serves, and one that dies of its first sample would be restarted for ever.
  """

  def __init__(self) -> None:
    self._samples: dict[str, float] = {}

  def update(self, rows: Iterable[reader_lib.Row]) -> set[str]:
    """Takes in new rows; returns the names of the processes."""
    return {row.role for row in rows if self._is_progress(row)}

  def _is_progress(self, row: reader_lib.Row) -> bool:
    if not row.role.startswith(metrics.REPLAY_SERVER):
      return True
    samples = row.values.get('samples_total', 0.0)
    before = self._samples.get(row.role, 0.0)
    self._samples[row.role] = samples
    return samples > before


@dataclasses.dataclass
class Experiment:
  """Runs the processes until the run is over, and accounts for it.

  Attributes:
    config: of the run.
    run_dir: of the run.
    specs: its processes.
    stop: ends the run when set.
    progress: called several times a second.
    resumed: whether the run directory holds an earlier part of the run.
    resume_flags: what the command to resume needs besides the directory.
    interactive: panel or lines; None asks the terminal.
  """

  config: config_lib.ExperimentConfig
  run_dir: pathlib.Path
  specs: Sequence[supervisor_lib.ProcessSpec]
  stop: threading.Event
  progress: Callable[[], None] = lambda: None
  resumed: bool = False
  resume_flags: str = ''
  interactive: bool | None = None

  def run(self) -> int:
    """Runs to the end; returns the exit status."""
    start_s = time.monotonic()
    evaluation = self.config.evaluation
    state = run_state.RunState()
    goal = console_lib.Goal(
      self.config.environment, evaluation.solved_return, str(self.run_dir)
    )
    with console_lib.Console(goal, interactive=self.interactive) as console:
      supervisor = supervisor_lib.Supervisor(
        self.specs,
        log_dir=self.run_dir / 'logs',
        say=console.say,
        environ={'PYTHONUNBUFFERED': '1', 'PYTHONFAULTHANDLER': '1'},
      )
      reader = reader_lib.Reader(self.run_dir, from_end=self.resumed)
      outcome = supervisor_lib.Outcome(True, 'an error in launch.local')
      troubles: list[str] = []
      try:
        supervisor.start()
        outcome = self._watch(supervisor, reader, state, console)
        console.say(f'{outcome.reason}; stopping')
        if outcome.detail:
          console.say(outcome.detail)
      finally:
        troubles = supervisor.stop(_STOP_DEADLINE_S)
      state.update(reader.poll())
    solved = _solved(state, evaluation.solved_return)
    summary = summary_lib.make(
      state,
      reason=outcome.reason,
      solved=solved,
      wall_s=time.monotonic() - start_s,
      restarts=supervisor.restarts(),
    )
    self._report(summary)
    if outcome.user_error:
      troubles = []  # The same mistake in the words of other roles.
    if outcome.failed:
      troubles = [outcome.reason, *troubles]
    for trouble in troubles:
      print(f'error: {trouble}', file=sys.stderr)
    if outcome.user_error:
      return 2
    return 1 if troubles or solved is False else 0

  def _watch(self, supervisor, reader, state, console):
    """Supervises until there is an outcome."""
    evaluation = self.config.evaluation
    solved = SolvedCheck(evaluation.solved_return, evaluation.hold_s)
    last = _LastEvaluation(self.config, console.say)
    progress = Progress()
    episodes = transcripts.Follower(self.run_dir)
    began_s = time.time()
    end_s = time.monotonic() + (evaluation.max_run_s or math.inf)
    while True:
      self.progress()
      outcome = supervisor.poll()
      rows = reader.poll()
      for role in progress.update(rows):
        supervisor.note_progress(role)
      state.update(rows)
      if not state.has_learnt:
        state.milestones = _milestones(self.run_dir, began_s)
      if outcome is not None and not last.is_missing(outcome, state):
        return outcome
      if solved.update(state.evaluations):
        return supervisor_lib.Outcome(False, _solved_text(state))
      if time.monotonic() >= end_s:
        return supervisor_lib.Outcome(
          False, f'max_run_s ({evaluation.max_run_s:g} s) is over'
        )
      episode = episodes.poll()
      if episode:
        console.say(episode)
      console.update(state, supervisor.statuses())
      if self.stop.wait(_POLL_PERIOD_S):
        return supervisor_lib.Outcome(False, 'stopped by a signal')

  def _report(self, summary: dict[str, Any]) -> None:
    path = self.run_dir / 'summary.json'
    try:
      path.write_text(json.dumps(summary, indent=2, allow_nan=False) + '\n')
    except OSError as e:
      print(f'warning: {path} cannot be written: {e}', file=sys.stderr)
    print(f'\nSummary of {self.run_dir}\n{summary_lib.as_text(summary)}\n')
    if not has_checkpoint(self.run_dir):
      print('No checkpoint was written: there is nothing to resume from.')
      return
    python, run_dir = _python(), shlex.quote(str(self.run_dir))
    print(
      f'Resume:   {python} -m launch.local --run_dir={run_dir} --resume'
      f'{self.resume_flags}\n'
      f'Evaluate: {python} -m launch.evaluator --checkpoint={run_dir}',
      flush=True,
    )


class _LastEvaluation:
  """Waits for the evaluation of what a completed learner published last.

  Without it, a run with a threshold would be judged by whatever params the
  evaluator had got to when the learner ended.
  """

  def __init__(
    self, config: config_lib.ExperimentConfig, say: Callable[[str], None]
  ):
    self._is_wanted = math.isfinite(config.evaluation.solved_return)
    self._timeout_s = config.watchdog_s
    self._until_s: float | None = None
    self._say = say

  def is_missing(
    self, outcome: supervisor_lib.Outcome, state: run_state.RunState
  ) -> bool:
    """Whether to go on waiting for it."""
    if not (outcome.completed and self._is_wanted):
      return False
    version = state.latest(metrics.LEARNER, 'policy_version')
    if math.isnan(version) or any(
      evaluation.policy_version >= version for evaluation in state.evaluations
    ):
      return False
    if self._until_s is None:
      self._until_s = time.monotonic() + self._timeout_s
      self._say(f'{outcome.reason}; evaluating its last variables')
    return time.monotonic() < self._until_s


def _milestones(run_dir: pathlib.Path, since_s: float) -> dict[str, str]:
  """How far each role has got in starting, in the order they got there."""
  try:
    marks = milestones.read(run_dir)
  except (OSError, ValueError):
    return {}  # Cut off by a full disk: the view does without.
  return {m['role']: m['name'] for m in marks if m['time_s'] >= since_s}


def _solved(state: run_state.RunState, solved_return: float) -> bool | None:
  """Whether the last evaluation reaches the threshold; None without one."""
  if not math.isfinite(solved_return):
    return None
  return bool(
    state.evaluations and state.evaluations[-1].return_mean >= solved_return
  )


def _solved_text(state: run_state.RunState) -> str:
  last = state.evaluations[-1]
  return (
    f'solved: mean return {last.return_mean:.4g} over {last.episodes} '
    'evaluation episodes'
  )


def _python() -> str:
  """This interpreter as one would type it here."""
  relative = os.path.relpath(sys.executable)
  path = sys.executable if relative.startswith('..') else relative
  return shlex.join(interpreters_lib.command(path))
