"""A whole run under `launch.local`'s machinery, with small real children."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from launch import experiment
from launch import supervisor as supervisor_lib
from launch import topology
from tunix_reverb import errors
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents import flat
from tunix_reverb.telemetry import reader
from tunix_reverb.telemetry import run_state

pytestmark = pytest.mark.integration

# Writes metrics like a role until it is told to stop.
_ROLE = """
import os, pathlib, signal, sys, time
from launch import shutdown
from tunix_reverb.telemetry import logger
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
shutdown.die_with_parent(int(os.environ[shutdown.PARENT_PID]))
metrics = logger.MetricLogger(pathlib.Path(sys.argv[1]), sys.argv[2])
{before}
for step in range(1, int(sys.argv[3]) + 1):
  values = {values}
  metrics.write(values, step)
  time.sleep(0.05)
"""
_LEARNER = _ROLE.format(
  before='',
  values="{'learner_step': step, 'policy_lag_mean': 2.0,"
  " 'transitions_total': 100 * step}",
)
# A rate takes two reports.
_TWO_REPORTS = """
reports = pathlib.Path(sys.argv[1], 'metrics', 'learner.jsonl')
while not (reports.exists() and reports.read_text().count('\\n') >= 2):
  time.sleep(0.01)
"""
_EVALUATOR = _ROLE.format(
  before=_TWO_REPORTS,
  values="{'evaluation_return_mean': step / 10, 'evaluation_episodes': 4}",
)


def _specs(run_dir, *, learner_steps=10_000, evaluations=10_000):
  command = lambda code, name, steps: [
    sys.executable,
    '-c',
    code,
    str(run_dir),
    name,
    str(steps),
  ]
  return [
    supervisor_lib.ProcessSpec(
      name='learner',
      command=command(_LEARNER, 'learner', learner_steps),
      completes=True,
    ),
    supervisor_lib.ProcessSpec(
      name='evaluator',
      restart=True,
      command=command(_EVALUATOR, 'evaluator', evaluations),
    ),
  ]


def _run(run_dir, specs, stop=None, **values):
  config = flat.from_flat(values)
  lock = experiment.prepare_run_dir(run_dir, config, resume=False)
  with lock:
    return experiment.Experiment(
      config=config,
      run_dir=run_dir,
      specs=specs,
      stop=stop or threading.Event(),
      interactive=False,
    ).run()


@pytest.fixture(autouse=True)
def python_path(monkeypatch, subprocess_env):
  """Children find the same package as the tests do."""
  if subprocess_env.get('PYTHONPATH'):
    monkeypatch.setenv('PYTHONPATH', subprocess_env['PYTHONPATH'])


def test_a_solved_run_ends_with_0_and_a_summary(tmp_path, capsys):
  (tmp_path / 'checkpoints' / 'learner' / '7').mkdir(parents=True)
  status = _run(tmp_path, _specs(tmp_path), solved_return=0.5)
  out = capsys.readouterr().out
  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert status == 0
  assert summary['solved'] is True
  assert summary['evaluation_return_mean'] >= 0.5
  assert summary['learner_step'] > 0
  assert summary['transitions_per_s'] > 0
  assert summary['policy_lag_mean'] == 2.0
  assert summary['restarts'] == {}
  assert f'launch.local --run_dir={tmp_path} --resume' in out
  assert f'launch.evaluator --checkpoint={tmp_path}' in out


def test_a_learner_that_completes_unsolved_gives_status_1(tmp_path):
  specs = _specs(tmp_path, learner_steps=5)
  assert _run(tmp_path, specs, solved_return=1e9) == 1
  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert (summary['solved'], summary['reason']) == (False, 'learner completed')


def test_without_a_threshold_a_completed_run_gives_0(tmp_path):
  assert _run(tmp_path, _specs(tmp_path, learner_steps=5)) == 0
  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert summary['solved'] is None


def test_max_run_s_ends_the_run(tmp_path):
  start_s = time.monotonic()
  assert _run(tmp_path, _specs(tmp_path), max_run_s=1.0) == 0
  assert 1.0 < time.monotonic() - start_s < 8.0


def test_the_death_of_the_learner_ends_the_run_and_says_so(tmp_path, capsys):
  specs = _specs(tmp_path)
  code = 'import os; print("last words", flush=True); os.kill(os.getpid(), 9)'
  learner = supervisor_lib.ProcessSpec(
    name='learner', command=[sys.executable, '-c', code], completes=True
  )
  start_s = time.monotonic()
  assert _run(tmp_path, [learner, *specs[1:]]) == 1
  assert time.monotonic() - start_s < 10.0
  captured = capsys.readouterr()
  assert 'error: learner ended (killed by SIGKILL)' in captured.err
  assert 'last words' in captured.out
  assert not json.loads((tmp_path / 'summary.json').read_text())['solved']


def test_stop_ends_the_run(tmp_path):
  stop = threading.Event()
  timer = threading.Timer(1.0, stop.set)
  timer.start()
  assert _run(tmp_path, _specs(tmp_path), stop=stop) == 0
  timer.join()
  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert summary['reason'] == 'stopped by a signal'


# An evaluator that takes its time: two seconds after the learner has ended it
# is through with the last version.
_LATE_EVALUATOR = """
import pathlib, sys, time
from tunix_reverb.telemetry import logger
metrics = logger.MetricLogger(pathlib.Path(sys.argv[1]), 'evaluator')
for version, mean in ((3, 0.0), (5, 1.0)):
  metrics.write({'evaluation_return_mean': mean, 'evaluation_episodes': 4,
                 'policy_version': version}, version)
  time.sleep(2.0 if version == 3 else 60.0)
"""


@pytest.mark.parametrize('threshold', [0.5, None])
def test_a_completed_run_is_judged_by_its_last_params(
  tmp_path, capsys, threshold
):
  learner = _ROLE.format(
    before='', values="{'learner_step': step, 'policy_version': step}"
  )
  command = lambda code, *args: [
    sys.executable,
    '-c',
    code,
    str(tmp_path),
    *args,
  ]
  specs = [
    supervisor_lib.ProcessSpec(
      name='learner', command=command(learner, 'learner', '5'), completes=True
    ),
    supervisor_lib.ProcessSpec(
      name='evaluator', command=command(_LATE_EVALUATOR), restart=True
    ),
  ]
  values = {} if threshold is None else {'solved_return': threshold}
  assert _run(tmp_path, specs, **values) == 0
  out = capsys.readouterr().out
  summary = json.loads((tmp_path / 'summary.json').read_text())
  if threshold is None:
    assert summary['reason'] == 'learner completed'
    assert summary['evaluation_return_mean'] == 0.0
  else:
    assert 'learner completed; evaluating its last variables' in out
    assert summary['solved'] is True
    assert summary['evaluation_return_mean'] == 1.0


def _evaluations(*returns):
  return [
    run_state.Evaluation(float(t), 1, 10, value, 0.0)
    for t, value in enumerate(returns)
  ]


@pytest.mark.parametrize(
  ('hold_s', 'returns', 'solved_at'),
  [
    (0.0, [0.1, 0.9, 0.1], 1),
    (2.0, [0.9, 0.1, 0.9], 2),  # What counts is the end of the hold.
    (2.0, [0.9, 0.9, 0.1, 0.9, 0.9, 0.9], 5),  # Missed: it starts over.
    (2.0, [0.9, 0.9], None),
    (0.0, [0.1, 0.2], None),
  ],
)
def test_solved_is_reached_and_held(hold_s, returns, solved_at):
  check = experiment.SolvedCheck(0.5, hold_s)
  evaluations = _evaluations(*returns)
  solved = [check.update(evaluations[: n + 1]) for n in range(len(evaluations))]
  expected = [n == solved_at for n in range(len(evaluations))]
  end = len(returns) if solved_at is None else solved_at + 1
  assert solved[:end] == expected[:end]


def test_a_used_run_directory_needs_resume_and_resume_a_used_one(tmp_path):
  config = config_lib.ExperimentConfig()
  with pytest.raises(errors.UserError, match='must hold a run to resume'):
    experiment.prepare_run_dir(tmp_path, config, resume=True)
  experiment.prepare_run_dir(tmp_path, config, resume=False).close()
  with pytest.raises(errors.UserError, match='--resume'):
    experiment.prepare_run_dir(tmp_path, config, resume=False)
  changed = flat.from_flat({'seed': 5})
  lock = experiment.prepare_run_dir(tmp_path, changed, resume=True)
  with lock:
    with pytest.raises(errors.UserError, match='in use'):
      experiment.prepare_run_dir(tmp_path, changed, resume=True)
  assert flat.loads((tmp_path / 'config.json').read_text()) == changed
  assert not experiment.has_checkpoint(tmp_path)


def test_a_run_directory_that_cannot_be_made_is_a_users_mistake(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UserError, match='writable directory'):
    experiment.prepare_run_dir(
      tmp_path / 'file' / 'run', config_lib.ExperimentConfig(), resume=False
    )


@pytest.mark.parametrize(
  'left', ['metrics/learner.jsonl', 'checkpoints/learner/7']
)
def test_a_run_has_begun_once_its_learner_has_left_something(tmp_path, left):
  assert not experiment.has_begun(tmp_path)
  (tmp_path / 'metrics').mkdir()
  (tmp_path / 'metrics' / 'actor_0.jsonl').touch()
  assert not experiment.has_begun(tmp_path)
  (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / left).touch()
  assert experiment.has_begun(tmp_path)


def test_a_run_dir_given_up_can_be_used_again(tmp_path):
  config = config_lib.ExperimentConfig()
  for run_dir, is_new in ((tmp_path / 'new', True), (tmp_path, False)):
    experiment.prepare_run_dir(run_dir, config, resume=False).close()
    (tmp_path / 'mine').touch()
    experiment.give_up_run_dir(run_dir, is_new=is_new)
    assert run_dir.exists() != is_new
    experiment.prepare_run_dir(run_dir, config, resume=False).close()
  assert (tmp_path / 'mine').exists()


def test_the_table_of_processes_follows_the_config(tmp_path):
  config = flat.from_flat({'num_actors': 3, 'num_servers': 2})
  ports = topology.pick_free_ports(2)
  specs = {s.name: s for s in experiment.make_specs(config, tmp_path, ports)}
  assert list(specs) == [
    'replay_server_0',
    'replay_server_1',
    'learner',
    'actor_0',
    'actor_1',
    'actor_2',
    'evaluator',
  ]
  assert [n for n, s in specs.items() if not s.restart] == ['learner']
  assert [n for n, s in specs.items() if s.saves] == [
    'replay_server_0',
    'replay_server_1',
    'learner',
  ]
  assert [n for n, s in specs.items() if s.stop_last] == [
    'replay_server_0',
    'replay_server_1',
  ]
  assert f'--port={ports[1]}' in specs['replay_server_1'].command
  (server,) = experiment.make_specs(
    config, tmp_path, ports[:1], replay_restore='discard'
  )[:1]
  assert '--replay_restore=discard' in server.command
  # Else a restart would throw away what the server has saved since.
  assert server.restart_command == server.command[:-1]
  none = flat.from_flat({'evaluation_period_s': 0.0})
  assert 'evaluator' not in [
    s.name for s in experiment.make_specs(none, tmp_path, ports[:1])
  ]


def test_learner_processes_are_a_group_with_one_address(tmp_path):
  config = flat.from_flat({'num_learners': 2})
  specs = {
    s.name: s
    for s in experiment.make_specs(config, tmp_path, [1], coordinator_port=7)
  }
  first, second = specs['learner'], specs['learner_1']
  assert {'--learner_index=0', '--coordinator_address=localhost:7'} <= {
    *first.command
  }
  assert {'--learner_index=1', '--coordinator_address=localhost:7'} <= {
    *second.command
  }
  assert first.group == second.group == 'learner'
  assert first.restart and second.restart and second.completes
  assert {s.group for n, s in specs.items() if 'learner' not in n} == {''}


def test_each_kind_of_role_runs_on_its_interpreter(tmp_path):
  config = flat.from_flat({'num_actors': 2})
  specs = experiment.make_specs(
    config, tmp_path, [1], interpreters={'replay_server': ['a'], 'actor': ['b']}
  )
  pythons = {s.name: s.command[0] for s in specs}
  assert pythons == {
    'replay_server_0': 'a',
    'learner': sys.executable,
    'actor_0': 'b',
    'actor_1': 'b',
    'evaluator': sys.executable,
  }
  assert specs[0].restart_command[0] == 'a'
  assert not any('--columns_file' in part for part in specs[0].command)
  (server, *_) = experiment.make_specs(config, tmp_path, [1], columns_file=True)
  flag = f'--columns_file={tmp_path}/columns.json'
  assert flag in server.command and flag in server.restart_command


def test_a_replay_server_makes_progress_when_it_is_sampled_from():
  progress = experiment.Progress()

  def report(role, **values):
    return progress.update([reader.Row(0.0, role, 1, values)])

  assert report('actor_0') == {'actor_0'}
  assert report('replay_server_0', samples_total=0.0) == set()
  assert report('replay_server_0', samples_total=5.0) == {'replay_server_0'}
  assert report('replay_server_1', samples_total=5.0) == {'replay_server_1'}
  # It died and came back from its checkpoint.
  assert report('replay_server_0', samples_total=3.0) == set()
  assert report('replay_server_0', samples_total=4.0) == {'replay_server_0'}


def test_topology_round_trips_and_says_what_is_wrong(tmp_path):
  topology.write(tmp_path, ['localhost:1234', 'localhost:1235'])
  assert topology.replay_servers(None, tmp_path) == [
    'localhost:1234',
    'localhost:1235',
  ]
  assert topology.replay_servers(['host:9'], tmp_path) == ['host:9']
  with pytest.raises(errors.UserError, match='replay_servers'):
    topology.replay_servers(None, None)
  with pytest.raises(errors.UserError, match='host:port'):
    topology.replay_servers(['localhost'], None)
  (tmp_path / 'topology.json').write_text('{')
  with pytest.raises(errors.UserError, match=r'topology\.json'):
    topology.replay_servers(None, tmp_path)


# `launch.local` itself: its own flags, signals and exit, with children that
# are put in the place of the roles.
_LOCAL = f"""
import pathlib, sys
from launch import experiment, interpreters, local, supervisor
roles = {{'learner': {_LEARNER!r}, 'evaluator': {_EVALUATOR!r}}}
def make_specs(config, run_dir, ports, **flags):
  return [supervisor.ProcessSpec(
      name=name, restart=name == 'evaluator', completes=name == 'learner',
      command=[sys.executable, '-c', code, str(run_dir), name, '999'])
      for name, code in roles.items()]
experiment.make_specs = make_specs
interpreters.resolve = lambda *_, **__: None
local.main()
"""


@pytest.fixture
def local(subprocess_env, tmp_path):
  """Starts `launch.local` with small children; kills what is left of it."""
  started = []

  def _start(*args):
    process = subprocess.Popen(
      [sys.executable, '-c', _LOCAL, *args],
      env=subprocess_env,
      cwd=tmp_path,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    started.append(process)
    return process

  yield _start
  for process in started:
    process.kill()
    process.communicate()


def _children(pid):
  path = pathlib.Path(f'/proc/{pid}/task/{pid}/children')
  return [int(child) for child in path.read_text().split()]


def _alive(pid):
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


def _wait(condition, timeout_s=20.0):
  deadline_s = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline_s
    time.sleep(0.02)


def test_ctrl_c_reports_and_resume_takes_the_saved_config(local, tmp_path):
  process = local('--run_dir=run', '--seed=5')
  _wait(lambda: (tmp_path / 'run/metrics/learner.jsonl').exists())
  children = _children(process.pid)
  start_s = time.monotonic()
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=15)
  assert time.monotonic() - start_s < 10.0
  assert process.returncode == 0, err
  assert 'stopped by a signal' in out
  assert 'No checkpoint was written' in out
  assert not [pid for pid in children if _alive(pid)]

  again = local('--run_dir=run')
  assert '--resume' in again.communicate(timeout=15)[1]
  assert again.returncode == 2

  resumed = local('--run_dir=run', '--resume', '--max_run_s=1')
  out, err = resumed.communicate(timeout=30)
  assert resumed.returncode == 0, err
  assert 'no learner checkpoint' in out
  config = json.loads((tmp_path / 'run/config.json').read_text())
  assert (config['seed'], config['max_run_s']) == (5, 1.0)


def test_no_role_survives_kill_9_of_local(local, tmp_path):
  process = local('--run_dir=run')
  _wait(lambda: (tmp_path / 'run/metrics/learner.jsonl').exists())
  children = _children(process.pid)
  assert len(children) == 2
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  _wait(lambda: not [pid for pid in children if _alive(pid)])


@pytest.mark.parametrize(
  ('args', 'words'),
  [
    (['--resume'], 'resume (True) must come with --run_dir'),
    (['--resume', '--run_dir=absent'], 'must hold a run to resume'),
    (['--solved_return=1', '--evaluation_period_s=0'], 'evaluation_period_s'),
  ],
)
def test_mistakes_are_told_in_one_line(local, args, words):
  process = local(*args)
  _, err = process.communicate(timeout=15)
  assert process.returncode == 2
  assert words in err and err.count('\n') == 1


_FULL_DISK = """
import pathlib, resource, signal, sys
from launch import experiment
from tunix_reverb import errors
from tunix_reverb.agents import flat
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
  experiment.prepare_run_dir(
      pathlib.Path(sys.argv[1]), flat.from_flat({'seed': 9}), resume=True)
except errors.UserError as e:
  print(e)
"""


def test_a_full_disk_is_told_and_leaves_the_old_config(
  subprocess_env, tmp_path
):
  text = flat.dumps(config_lib.ExperimentConfig())
  (tmp_path / 'config.json').write_text(text)
  # A limit on the size of files fails writes half way, as a full disk does.
  result = subprocess.run(
    [sys.executable, '-c', _FULL_DISK, str(tmp_path)],
    env=subprocess_env,
    text=True,
    capture_output=True,
    timeout=30,
  )
  assert 'must be a writable directory' in result.stdout, result.stderr
  assert (tmp_path / 'config.json').read_text() == text
  assert sorted(p.name for p in tmp_path.iterdir()) == ['.lock', 'config.json']
