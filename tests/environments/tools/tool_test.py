"""Tools: their schemas, and the arguments of calls."""

import typing

import pytest

from tunix_reverb import errors
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool


@tool.tool
def search(
  query: str,
  limit: int = 3,
  kind: typing.Literal['book', 'film'] = 'book',
  tags: list[str] | None = None,
) -> list:
  """Searches the library,
  all of it.

  Args:
    query: what to look for,
      in words.
    limit (int): most results.

  Returns:
    Titles.
  """
  return [query] * limit


def test_the_schema_comes_from_hints_and_docstring():
  assert search.schema == {
    'type': 'function',
    'function': {
      'name': 'search',
      'description': 'Searches the library, all of it.',
      'parameters': {
        'type': 'object',
        'properties': {
          'query': {
            'type': 'string',
            'description': 'what to look for, in words.',
          },
          'limit': {'type': 'integer', 'description': 'most results.'},
          'kind': {'type': 'string', 'enum': ['book', 'film']},
          'tags': {'type': ['array', 'null'], 'items': {'type': 'string'}},
        },
        'required': ['query'],
      },
    },
  }


def test_good_arguments_are_kept():
  arguments = {'query': 'x', 'limit': 1, 'kind': 'film', 'tags': None}
  assert search.bind(arguments) == arguments
  assert search.bind('x') == {'query': 'x'}


@pytest.mark.parametrize(
  'arguments,words',
  [
    ({}, 'query is missing'),
    ({'query': 1}, 'query must be of type string'),
    ({'query': 'x', 'limit': 'many'}, 'limit must be of type integer'),
    ({'query': 'x', 'limit': True}, 'limit must be of type integer'),
    ({'query': 'x', 'kind': 'song'}, "kind must be one of ['book', 'film']"),
    ({'query': 'x', 'tags': 1}, 'tags must be of type array or null'),
    ({'query': 'x', 'order': 1}, 'there is no order'),
  ],
)
def test_bad_arguments_are_refused_with_the_usage(arguments, words):
  with pytest.raises(taxonomy.CallError) as raised:
    search.bind(arguments)
  assert str(raised.value) == f'search(query, limit, kind, tags): {words}'


def test_text_is_converted_to_the_first_parameter():
  @tool.tool
  def double(number: int = 2) -> int:
    """Doubles."""
    return 2 * number

  assert double.bind('21') == {'number': 21}
  assert double.bind('') == {}
  with pytest.raises(taxonomy.CallError, match='number must be of type int'):
    double.bind('x')


def test_a_tool_without_parameters_takes_no_text():
  @tool.tool
  def now() -> str:
    """Says what time it is."""
    return 'noon'

  assert now.bind('what?') == {}


def test_a_tool_defined_anew_is_described_by_its_own_docstring():
  def make(text):
    def say() -> str:
      return text

    say.__doc__ = f'Says {text}.'
    return tool.tool(say)

  first, again, other = make('a'), make('a'), make('b')
  assert first.description == again.description == 'Says a.'
  assert other.description == 'Says b.'
  assert (first.function(), other.function()) == ('a', 'b')


def test_what_a_schema_needs_is_asked_for():
  def undocumented(x: int):
    return x

  def unhinted(x):
    """Does."""
    return x

  def odd(x: set):
    """Does."""
    return x

  def unknown(x: 'Unknown'):  # noqa: F821
    """Does."""
    return x

  with pytest.raises(errors.UserError, match="'Unknown' is not defined"):
    tool.tool(unknown)
  with pytest.raises(errors.UserError, match='must have a docstring'):
    tool.tool(undocumented)
  for function in (unhinted, odd):
    with pytest.raises(errors.UserError, match='must have a type hint of str'):
      tool.tool(function)


@pytest.mark.parametrize(
  'name,value',
  [
    ('timeout_s', 0.0),
    ('num_retries', -1),
    ('back_off_s', -0.1),
    ('max_concurrency', 0),
    ('max_result_characters', 0),
  ],
)
def test_bad_limits_are_refused(name, value):
  with pytest.raises(errors.UserError, match=name):
    tool.Limits(**{name: value})
