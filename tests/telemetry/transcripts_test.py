"""Transcripts are kept, and shown now and then."""

import json

from tunix_reverb.telemetry import transcripts


def _transcript(**kwargs):
  return {
    'seed': 1,
    'episode': 5,
    'messages': [
      {'role': 'system', 'content': 'Be brief.'},
      {'role': 'user', 'content': '47'},
      {'role': 'assistant', 'content': ''},
      {'role': 'tool', 'name': 'lookup', 'content': '3\n9'},
      {'role': 'tool', 'name': 'error', 'content': 'error: no'},
      {'role': 'assistant', 'content': 'x' * 500},
    ],
    'turns': [
      {
        'text': '<call>',
        'tokens': [1],
        'calls': [{'name': 'lookup', 'duration_s': 0.0021}],
      },
      {'text': 'x' * 500, 'tokens': [7], 'calls': []},
    ],
    'score': 1.0,
    'outcome': 'terminated',
    'total_reward': 1.1,
  } | kwargs


def test_an_episode_is_told_in_a_line_for_each_message():
  text = transcripts.render({'policy_version': 9} | _transcript())
  head, *lines = text.split('\n')
  assert head == 'episode of version 9: terminated, reward 1.1, score 1'
  assert [line.strip() for line in lines[:4]] == [
    'user: 47',
    'policy: <call>',
    'tool lookup (2.1 ms): 3\\n9',
    'tool: error: no',
  ]
  assert lines[4].endswith('xxx ...') and len(lines[4]) < 200
  text = transcripts.render(
    {'policy_version': 9} | _transcript(), with_tokens=True
  )
  assert 'policy: <call>   [1]' in text
  truncated = _transcript(score=None, outcome='truncated')
  text = transcripts.render({'policy_version': 9} | truncated)
  assert text.startswith('episode of version 9: truncated, reward 1.1\n')


def test_the_first_few_of_each_evaluation_are_kept(tmp_path):
  episodes = [_transcript(episode=i) for i in range(20)]
  for version in (3, 4):
    transcripts.write(tmp_path, episodes, version)
  transcripts.write(None, episodes, 5)
  transcripts.write(tmp_path, [], 6)
  lines = (tmp_path / transcripts.FILE).read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert transcripts.read(tmp_path) == rows
  assert [row['policy_version'] for row in rows] == [3] * 8 + [4] * 8
  assert rows[8] == {'policy_version': 4, **episodes[0]}


def test_the_newest_is_shown_once_in_a_while(tmp_path):
  follower = transcripts.Follower(tmp_path, period_s=0.0)
  assert follower.poll() == ''
  transcripts.write(tmp_path, [_transcript()] * 3, 3)
  assert follower.poll().startswith('episode of version 3')
  assert follower.poll() == ''
  transcripts.write(tmp_path, [_transcript()], 4)
  with (tmp_path / transcripts.FILE).open('a') as file:
    file.write('{"cut": ')
  assert follower.poll().startswith('episode of version 4')


def test_not_more_often_than_it_is_told(tmp_path):
  transcripts.write(tmp_path, [_transcript()], 3)
  # What an earlier part of the run has left is not shown.
  follower = transcripts.Follower(tmp_path, period_s=1e9)
  assert follower.poll() == ''
  transcripts.write(tmp_path, [_transcript()], 4)
  assert follower.poll().startswith('episode of version 4')
  transcripts.write(tmp_path, [_transcript()], 5)
  assert follower.poll() == ''


def test_what_a_crash_has_cut_off_is_left_out(tmp_path):
  assert transcripts.read(tmp_path) == []
  transcripts.write(tmp_path, [_transcript()], 3)
  with (tmp_path / transcripts.FILE).open('a') as file:
    file.write('{"cut": ')
  assert len(transcripts.read(tmp_path)) == 1
