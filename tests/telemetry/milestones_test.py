"""Milestones: what is written where, and that nothing stops a role."""

from tunix_reverb.telemetry import milestones


def test_marks_come_back_in_order_and_the_directory_is_made(tmp_path, capsys):
  run_dir = tmp_path / 'not' / 'yet'
  milestones.Milestones(run_dir, 'learner').mark('imported')
  milestones.Milestones(run_dir, 'actor_0').mark('acts')
  marks = milestones.read(run_dir)
  assert [(m['role'], m['name']) for m in marks] == [
    ('learner', 'imported'),
    ('actor_0', 'acts'),
  ]
  assert marks[0]['time_s'] <= marks[1]['time_s']
  assert capsys.readouterr().out == 'learner: imported\nactor_0: acts\n'


def test_a_line_that_was_cut_off_is_passed_over(tmp_path):
  milestones.Milestones(tmp_path, 'learner').mark('imported')
  with (tmp_path / 'milestones.jsonl').open('a') as f:
    f.write('{"time_s": 1.0, "ro')
  assert [m['name'] for m in milestones.read(tmp_path)] == ['imported']


def test_what_cannot_be_written_is_told(tmp_path, capsys):
  (tmp_path / 'file').touch()
  milestones.Milestones(tmp_path / 'file', 'learner').mark('imported')
  assert 'milestones are not written' in capsys.readouterr().out
  assert milestones.read(tmp_path / 'other') == []
