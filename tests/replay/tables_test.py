"""Which tables are asked for, and how two of them are told apart."""

import pytest

from tunix_reverb.replay import small_tables
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

_COLUMNS = test_utils.columns()


def _describe(**kwargs) -> tables.TableDescription:
  return tables.describe(tables.TableConfig(**kwargs), _COLUMNS)


def test_the_limits_tell_what_keeps_the_balance():
  for mode in ('queue', 'replay'):
    assert _describe(mode=mode).balance == tables.LIMITER
    assert _describe(mode=mode, balance='permits').balance == 'permits'


def test_an_old_description_is_one_of_a_limiter():
  values = _describe(max_items=7).to_json()
  assert 'balance' not in values
  assert tables.TableDescription.from_json(values).balance == tables.LIMITER


@pytest.mark.parametrize('mode', ['queue', 'replay'])
def test_where_permits_keep_the_balance_the_limiters_facts_are_no_news(mode):
  ours = _describe(mode=mode, balance='permits', max_items=4)
  theirs = _describe(
    mode=mode, balance='permits', max_items=8, samples_per_insert=3.0
  )
  assert ours == theirs
  assert tables.differences(ours, theirs, 'it') == []
  assert tables.TableDescription.from_json(ours.to_json()) == ours


def test_another_balance_is_told_by_its_flag_alone():
  ours = _describe(balance='permits')
  for mode in ('queue', 'replay'):
    theirs = _describe(mode=mode, max_items=4, samples_per_insert=3.0)
    ours = _describe(mode=mode, balance='permits')
    assert tables.differences(ours, theirs, 'the server') == [
      'admission: this run has True, the server has False'
    ]
    assert tables.differences(theirs, ours, 'the server') == [
      'admission: this run has False, the server has True'
    ]


def test_other_differences_are_told_beside_the_balance():
  ours = _describe(mode='replay', balance='permits')
  lines = tables.differences(ours, _describe(), 'the server')
  assert [line.partition(':')[0] for line in lines] == [
    'admission',
    'replay_mode',
    'sampler',
  ]


def test_min_items_counts_in_replay_mode_only():
  assert _describe(balance='permits', min_items=3).min_items == 1
  ours = _describe(mode='replay', balance='permits', min_items=3)
  theirs = _describe(mode='replay', balance='permits', min_items=2)
  assert tables.differences(ours, theirs, 'it') == [
    'min_table_items: this run has 3, it has 2'
  ]


def test_an_unknown_balance_is_refused():
  with pytest.raises(ValueError, match="balance \\('none'\\) must be one of"):
    tables.TableConfig(balance='none')


def test_small_tables_are_the_documented_ones():
  names = {
    balance: [t.name for t in small_tables.make_small_tables(balance)]
    for balance in (tables.LIMITER, tables.PERMIT_BALANCE)
  }
  assert names == {
    'limiter': ['policy_version'],
    'permits': [
      'policy_version',
      'index',
      'announcements',
      'removed',
      'permits',
    ],
  }
