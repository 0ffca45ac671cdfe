"""The calculator: what it works out, and what it refuses."""

import hypothesis
from hypothesis import strategies as st
import pytest

from tunix_reverb.environments.tools import calculator
from tunix_reverb.environments.tools import taxonomy

_calculate = calculator.calculator.function


@pytest.mark.parametrize(
  'expression,result',
  [
    ('1+2', '3'),
    (' (2 + 3) * 4 ', '20'),
    ('7/2', '3.5'),
    ('8/2', '4'),
    ('7//2', '3'),
    ('-7 % 3', '2'),
    ('2**10', '1024'),
    ('--3', '3'),
    ('0.1+0.2', '0.30000000000000004'),
    ('2**0.5', '1.4142135623730951'),
  ],
)
def test_results(expression, result):
  assert _calculate(expression) == result


@pytest.mark.parametrize(
  'expression,words',
  [
    ('', 'that is no expression'),
    ('1+', 'that is no expression'),
    ('1(2)', 'that is no expression'),
    ('1 2', 'that is no expression'),
    ('1/0', 'division by zero'),
    ('x+1', 'only numbers'),
    ('__import__("os")', 'only numbers'),
    ('9**9**9', 'too large'),
    ('10**4096', 'too large'),
    ('2.0**99999', 'too large'),
    ('(-8)**0.5', 'no real number'),
    ('1' * 201, 'may have 200 characters'),
    ('(' * 150, 'that is no expression'),
  ],
)
def test_refusals(expression, words):
  with pytest.raises(taxonomy.ToolError) as raised:
    _calculate(expression)
  assert words in str(raised.value).lower()


@hypothesis.given(st.text(alphabet='0123456789.+-*/%() ', max_size=30))
@hypothesis.settings(deadline=None)
def test_it_says_a_number_or_refuses(expression):
  try:
    float(_calculate(expression))
  except taxonomy.ToolError:
    pass
