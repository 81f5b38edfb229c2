"""Child process of `python_expression`: evaluates Python expressions from its input, one JSON line each.

It is run by path, isolated, and imports the standard library only. An expression is parsed and walked,
never compiled: there are no names but those below, no attributes but `math.*`, no way to define or to
import anything. What its limits leave undone is ended by the parent, which kills it.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import resource
import sys
from collections.abc import Callable, Iterator
from typing import TypedDict

MAX_RESULT_CHARS = 1000
FUNCTIONS: dict[str, Callable[..., object]] = {
    function.__name__: function
    for function in (abs, all, any, bool, dict, divmod, enumerate, float, int, len, list, max, min, pow)
} | {function.__name__: function for function in (range, reversed, round, set, sorted, str, sum, tuple, zip)}
MATHS: dict[str, object] = {name: getattr(math, name) for name in dir(math) if not name.startswith("_")}
OPERATORS: dict[type[ast.AST], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
GET_ITEM: Callable[..., object] = operator.getitem
ITERATE: Callable[..., Iterator[object]] = iter
"""Of any value: what does not have it raises a TypeError."""
Names = dict[str, object]


class Result(TypedDict):
    """The value of an expression as text, or what is wrong with it."""

    ok: bool
    text: str


class Refused(Exception):
    """The expression uses what there is not."""


def evaluate(text: str) -> object:
    """Return the value of an expression. Raises Refused, or what the computation itself raises."""
    return value_of(ast.parse(text.strip(), mode="eval").body, {})


def value_of(node: ast.expr, names: Names) -> object:
    """Return the value of one node of the tree; `names` are those that comprehensions around it bind."""
    walk = WALKS.get(type(node))
    if walk is None:
        raise Refused(f"{type(node).__name__} is not allowed")
    return walk(node, names)


def _constant(node: ast.Constant, names: Names) -> object:
    if not isinstance(node.value, int | float | str | None):
        raise Refused(f"{type(node.value).__name__} is not allowed")
    return node.value


def _name(node: ast.Name, names: Names) -> object:
    if node.id in names:
        return names[node.id]
    if node.id in MATHS and not callable(MATHS[node.id]):
        return MATHS[node.id]
    raise Refused(f"there is no '{node.id}'")


def _attribute(node: ast.Attribute, names: Names) -> object:
    is_math = isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in MATHS
    if not is_math or callable(MATHS[node.attr]):
        raise Refused(f"the attribute '{node.attr}' is not allowed")
    return MATHS[node.attr]


def _call(node: ast.Call, names: Names) -> object:
    function = _function(node.func)
    arguments = [value_of(argument, names) for argument in node.args]
    if any(keyword.arg is None for keyword in node.keywords):
        raise Refused("** is not allowed here")
    return function(*arguments, **{str(word.arg): value_of(word.value, names) for word in node.keywords})


def _function(node: ast.expr) -> Callable[..., object]:
    name = node.id if isinstance(node, ast.Name) else ""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math":
        name = node.attr
    found = FUNCTIONS.get(name) or MATHS.get(name)
    if not callable(found):
        raise Refused("there is no such function")
    return found


def _binary(node: ast.BinOp, names: Names) -> object:
    return OPERATORS[type(node.op)](value_of(node.left, names), value_of(node.right, names))


def _unary(node: ast.UnaryOp, names: Names) -> object:
    return OPERATORS[type(node.op)](value_of(node.operand, names))


def _both(node: ast.BoolOp, names: Names) -> object:
    value: object = None
    for operand in node.values:
        value = value_of(operand, names)
        if bool(value) is isinstance(node.op, ast.Or):
            break
    return value


def _compare(node: ast.Compare, names: Names) -> object:
    left = value_of(node.left, names)
    for sign, operand in zip(node.ops, node.comparators, strict=True):
        right = value_of(operand, names)
        if not OPERATORS[type(sign)](left, right):
            return False
        left = right
    return True


def _choose(node: ast.IfExp, names: Names) -> object:
    return value_of(node.body if value_of(node.test, names) else node.orelse, names)


def _subscript(node: ast.Subscript, names: Names) -> object:
    return GET_ITEM(value_of(node.value, names), value_of(node.slice, names))


def _slice(node: ast.Slice, names: Names) -> object:
    bounds = (node.lower, node.upper, node.step)
    return slice(*(None if bound is None else value_of(bound, names) for bound in bounds))


def _items(node: ast.List | ast.Tuple | ast.Set, names: Names) -> object:
    kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
    return kind(value_of(item, names) for item in node.elts)


def _pairs(node: ast.Dict, names: Names) -> object:
    if None in node.keys:
        raise Refused("** is not allowed here")
    keys = [value_of(key, names) for key in node.keys if key is not None]
    return dict(zip(keys, (value_of(value, names) for value in node.values), strict=True))


def _comprehension(node: ast.ListComp | ast.SetComp | ast.GeneratorExp, names: Names) -> object:
    kind = set if isinstance(node, ast.SetComp) else list
    return kind(value_of(node.elt, scope) for scope in _scopes(node.generators, names))


def _pair_comprehension(node: ast.DictComp, names: Names) -> object:
    scopes = _scopes(node.generators, names)
    return {value_of(node.key, scope): value_of(node.value, scope) for scope in scopes}


def _scopes(generators: list[ast.comprehension], names: Names) -> Iterator[Names]:
    """Yield the names that each round of nested `for ... in ... if ...` binds."""
    if not generators:
        yield names
        return
    first, *others = generators
    for item in ITERATE(value_of(first.iter, names)):
        scope = {**names, **_bound(first.target, item)}
        if all(value_of(condition, scope) for condition in first.ifs):
            yield from _scopes(others, scope)


def _bound(target: ast.expr, item: object) -> Names:
    if isinstance(target, ast.Name):
        return {target.id: item}
    if not isinstance(target, ast.Tuple):
        raise Refused("only names may be bound")
    bound: Names = {}
    for part, value in zip(target.elts, ITERATE(item), strict=True):
        bound |= _bound(part, value)
    return bound


WALKS: dict[type[ast.AST], Callable[..., object]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Call: _call,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.BoolOp: _both,
    ast.Compare: _compare,
    ast.IfExp: _choose,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.List: _items,
    ast.Tuple: _items,
    ast.Set: _items,
    ast.Dict: _pairs,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _pair_comprehension,
}


def answer(text: str) -> Result:
    """Return the result of one expression, or what is wrong with it."""
    try:
        result = repr(evaluate(text))
    except Exception as error:  # whatever a model's expression raises is its answer
        what = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        return {"ok": False, "text": what[:MAX_RESULT_CHARS]}
    return {"ok": True, "text": result[: MAX_RESULT_CHARS + 1]}


def limit(memory_bytes: int) -> None:
    """Give up memory beyond `memory_bytes`, files, processes and core dumps, for good."""
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def limit_time(cpu_s: int) -> None:
    """Let this process end itself after so many seconds of computing from here on."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = math.ceil(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + cpu_s, hard))


def main(memory_bytes: int, cpu_s: int) -> None:
    """Answer lines of JSON text until the input ends."""
    limit(memory_bytes)
    for line in sys.stdin:
        limit_time(cpu_s)
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
