"""Imports without a circle: not at run time, not for a type, not by way of a package."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "asyncrl",
    "benchmarks",
    "configs",
    "learner",
    "recipes",
    "research",
    "rollout_service",
    "weight_sync",
)


def find_modules(root: Path) -> dict[str, Path]:
    """Return the files of all packages by module name."""
    found = {}
    for path in (path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))):
        found[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a module imports anywhere, those for types included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute"
            yield from (f"{node.module}.{one.name}" for one in node.names)


def imports_of(name: str, tree: ast.Module, known: Mapping[str, object]) -> set[str]:
    """Return the known modules that a module imports, and the packages they lie in and it does not."""
    found = set()
    for dotted in names_in(tree):
        parts = dotted.split(".")
        prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        imported = [prefix for prefix in prefixes if prefix in known]
        found.update(one for one in imported[:-1] if not name.startswith(f"{one}."))
        found.update(imported[-1:])
    return found - {name}


def find_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return modules each of which imports the next, and the last the first; empty if there are none."""
    left = {name: set(targets) for name, targets in graph.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    if not left:
        return []
    path = [next(iter(left))]
    while (after := min(left[path[-1]] & left.keys())) not in path:
        path.append(after)
    return path[path.index(after) :]


def test_no_file_imports_another_in_a_circle() -> None:
    modules = find_modules(ROOT)
    graph = {name: imports_of(name, ast.parse(path.read_text()), modules) for name, path in modules.items()}
    assert sum(map(len, graph.values())) > 2000, "this is the graph of the whole repository"
    circle = find_circle(graph)
    assert not circle, f"{' -> '.join([*circle, circle[0]])}: let what both need stand in a third file"


def test_a_circle_is_found_whatever_form_its_imports_have() -> None:
    known = {"asyncrl.a": "", "asyncrl.b": "", "asyncrl.c": "", "asyncrl.c.d": ""}
    texts = {
        "asyncrl.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from asyncrl.b import B",
        "asyncrl.b": "def late():\n    from asyncrl.c.d import D",
        "asyncrl.c": "import asyncrl.a",
        "asyncrl.c.d": "import json",
    }
    graph = {name: imports_of(name, ast.parse(text), known) for name, text in texts.items()}
    assert sorted(find_circle(graph)) == ["asyncrl.a", "asyncrl.b", "asyncrl.c"]
    graph["asyncrl.c"].clear()
    assert find_circle(graph) == []
