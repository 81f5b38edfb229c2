"""Functions and classes of a user's file as they are written there: parsed, never run.

Invariant: only a plain `def` or `class` is told of: at the top of its file, undecorated, its name bound once.
Of anything else nothing is known before it runs.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_KIND = inspect.Parameter


def find_definition(module: ast.Module | None, name: str) -> ast.stmt | None:
    """Return the plain `def` or `class` of this name in a module, None if there is none."""
    body = [] if module is None else module.body
    found = [one for one in body if isinstance(one, Function | ast.ClassDef) and one.name == name]
    if module is None or len(found) != 1 or found[0].decorator_list or _count_bindings(module, name) != 1:
        return None
    return found[0]


def parse(file: Path) -> ast.Module | None:
    """Return what a file holds, None if it is no Python."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError):
        return None


def is_imported(module: ast.Module, name: str, package: str) -> bool:
    """Tell whether `name` is what a module imports from `package` or a module in it."""
    imports = (node for node in ast.walk(module) if isinstance(node, ast.ImportFrom))
    return any(
        f"{node.module}.".startswith(f"{package}.")
        and any(one.name == name and not one.asname for one in node.names)
        for node in imports
    )


def _count_bindings(module: ast.Module, name: str) -> int:
    """Return how often a module binds `name`, in any scope; a star import may bind it too."""
    return sum(
        (isinstance(node, Function | ast.ClassDef) and node.name == name)
        or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node.id == name)
        or (isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"))
        for node in ast.walk(module)
    )


def methods_of(definition: ast.ClassDef) -> dict[str, Function]:
    """Return the undecorated methods in the body of a class, by name."""
    found = (one for one in definition.body if isinstance(one, Function) and not one.decorator_list)
    return {one.name: one for one in found}


def names_in(definition: ast.ClassDef) -> set[str]:
    """Return every name that is defined or assigned anywhere in a class."""
    return {
        str(getattr(node, "name", None) or getattr(node, "id", None))
        for node in ast.walk(definition)
        if isinstance(node, Function | ast.ClassDef)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }


def stand_in(function: Function, is_method: bool = False) -> Callable[..., object]:
    """Return something of the signature of `function`, which is never called."""

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("it stands for a signature")

    never.__signature__ = signature_of(function, is_method)  # type: ignore[attr-defined]
    return never


def signature_of(function: Function, is_method: bool = False) -> inspect.Signature:
    """Return how `function` is called; a default stands for any."""
    told = function.args
    plain = [*told.posonlyargs, *told.args]
    num_required = len(plain) - len(told.defaults)
    parameters = [
        _KIND(
            one.arg,
            _KIND.POSITIONAL_ONLY if place < len(told.posonlyargs) else _KIND.POSITIONAL_OR_KEYWORD,
            default=_KIND.empty if place < num_required else None,
        )
        for place, one in enumerate(plain)
    ]
    parameters += [_KIND(told.vararg.arg, _KIND.VAR_POSITIONAL)] if told.vararg else []
    for one, default in zip(told.kwonlyargs, told.kw_defaults, strict=True):
        parameters.append(
            _KIND(one.arg, _KIND.KEYWORD_ONLY, default=_KIND.empty if default is None else None)
        )
    parameters += [_KIND(told.kwarg.arg, _KIND.VAR_KEYWORD)] if told.kwarg else []
    return inspect.Signature(parameters[1:] if is_method and plain else parameters)


def returns_nothing(function: ast.FunctionDef) -> bool:
    """Tell whether a call always returns None: there is no `return` with a value, and no `yield`."""
    return not any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        or (isinstance(node, ast.Return) and node.value is not None)
        for node in _own_nodes(function)
    )


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` without those of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _own_nodes(child)
