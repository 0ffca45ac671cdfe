"""A calculator: + - * / // % ** and parentheses, on numbers only."""

from __future__ import annotations

import ast
import operator
import re

from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool

_MAX_CHARACTERS = 200
_MAX_BITS = 4096
# Nothing else reaches Python's parser, which warns about odd text.
_ARITHMETIC = re.compile(r'[0-9.+\-*/%() ]*')
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
}


@tool.tool(timeout_s=None)
def calculator(expression: str) -> str:
  """Works out an arithmetic expression, such as (2 + 3) * 4.

  Args:
    expression: numbers, + - * / // % ** and parentheses.
  """
  if len(expression) > _MAX_CHARACTERS:
    raise taxonomy.ToolError(
      f'an expression may have {_MAX_CHARACTERS} characters, not '
      f'{len(expression)}'
    )
  if not _ARITHMETIC.fullmatch(expression):
    raise taxonomy.ToolError('only numbers, + - * / // % ** ( ) are allowed')
  try:
    value = _evaluate(ast.parse(expression.strip(), mode='eval').body)
  except (SyntaxError, RecursionError) as e:
    raise taxonomy.ToolError('that is no expression') from e
  except OverflowError as e:
    raise taxonomy.ToolError('the result is too large') from e
  except (ArithmeticError, ValueError) as e:
    raise taxonomy.ToolError(str(e)) from e
  if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
    value = int(value)
  return str(value)


def _evaluate(node: ast.AST) -> int | float:
  if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
    return node.value
  if isinstance(node, ast.UnaryOp):
    value = _evaluate(node.operand)
    return -value if isinstance(node.op, ast.USub) else value
  if isinstance(node, ast.BinOp):
    left, right = _evaluate(node.left), _evaluate(node.right)
    if isinstance(node.op, ast.Pow):
      _check_power(left, right)
    value = _OPERATORS[type(node.op)](left, right)
    if isinstance(value, complex):
      raise ValueError('the result is no real number')
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
      raise ValueError('the result is too large')
    return value
  raise SyntaxError('no arithmetic')


def _check_power(base: int | float, exponent: int | float) -> None:
  """Refuses before the work is done."""
  if isinstance(base, int) and isinstance(exponent, int):
    if base.bit_length() * abs(exponent) > _MAX_BITS:
      raise ValueError('the result is too large')
