"""A calculator: numbers, + - * / // % **, brackets (pure).

It runs in this process: the text is parsed, never compiled, and every size is bounded before it is
computed with.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from rollout_service.environments.tools.tool import Tool, ToolRefused

MAX_CHARS = 200
MAX_DIGITS = 100
ALLOWED = re.compile(r"[0-9eE.+*/%() -]*")
MAX_MAGNITUDE = 10**MAX_DIGITS
FORMS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator(Tool):
    """The tool `calculator`."""

    name = "calculator"
    description = "Computes an arithmetic expression with + - * / // % ** and brackets."
    argument = "expression"
    is_idempotent = True

    async def call(self, text: str) -> str:
        return calculate(text)


def calculate(text: str) -> str:
    """Return the value of an expression: whole numbers exactly, others with 12 digits.

    Raises:
        ToolRefused: It is no expression, has no value, or is too large.

    >>> calculate("(2 + 3) * 4 / 8")
    '2.5'
    """
    if len(text) > MAX_CHARS:
        raise ToolRefused(f"at most {MAX_CHARS} characters")
    if not ALLOWED.fullmatch(text):
        raise ToolRefused("only numbers, + - * / // % ** and brackets")
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, ToolRefused):
            raise
        raise ToolRefused("this is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ToolRefused("division by zero") from error
    return str(value) if isinstance(value, int) else format(value, ".12g")


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in FORMS:
        return _bounded(FORMS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in FORMS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _bounded(FORMS[type(node.op)](left, right))
    raise ToolRefused("only numbers, + - * / // % ** and brackets")


def _check_power(base: float, exponent: float) -> None:
    if base == 0 and exponent < 0:
        raise ToolRefused("division by zero")
    if base not in (0, 1, -1) and abs(exponent) * abs(math.log10(abs(base))) > MAX_DIGITS:
        raise ToolRefused("the number is too large")


def _bounded(value: object) -> float:
    if not isinstance(value, int | float):
        raise ToolRefused("the result is not a real number")
    if not abs(value) <= MAX_MAGNITUDE:
        raise ToolRefused("the number is too large")
    return value
