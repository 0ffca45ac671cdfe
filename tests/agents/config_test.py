"""What the config derives from its fields."""

import pytest

from tunix_reverb.agents import builder
from tunix_reverb.agents import flat
from tunix_reverb.replay import tables


@pytest.mark.parametrize(
  ('trajectory_length', 'bucket_lengths', 'batch_positions', 'expected'),
  [
    (99, (100,), 4000, 40),
    (49, (50, 100), 1000, 20),
    # Rows of 150 hold one trajectory of 100 positions, and 4 rows fit.
    (99, (150,), 700, 4),
  ],
)
def test_an_update_has_as_many_trajectories_as_always_fit(
  trajectory_length, bucket_lengths, batch_positions, expected
):
  values = {
    'trajectory_length': trajectory_length,
    'bucket_lengths': bucket_lengths,
    'batch_positions': batch_positions,
  }
  assert flat.from_flat(values).trajectories_per_update == expected
  values['trajectories_per_update'] = 7
  assert flat.from_flat(values).trajectories_per_update == 7


def test_admission_leaves_the_balance_to_permits():
  admission = {'admission': True, 'replay_client': 'wire'}
  with_it, without = (flat.from_flat(v) for v in (admission, {}))
  balance = lambda config: builder.make_table_config(config).balance
  assert balance(with_it) == tables.PERMIT_BALANCE
  assert balance(without) == tables.LIMITER
  # And nobody is asked for permits, or asks, without it.
  assert builder.make_permit_table(without, ['localhost:1']) is None
  assert builder.make_permit_source(without, 'localhost:1') is None
