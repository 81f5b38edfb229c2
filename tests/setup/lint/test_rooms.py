"""Sizes of rooms and folders, and files too small to stand alone: what makes a listing hard to read."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.setup.lint.test_circles import PACKAGES, ROOT, find_modules, imports_of

SHIPPED = ("asyncrl", "learner", "rollout_service", "weight_sync")
MAX_ROOM_LINES, MAX_FILES, MIN_LINES = 9_000, 10, 60
OVER_ROOM: dict[str, int] = {}
OVER_FOLDER: dict[str, int] = {}
ALONE = frozenset({"tests/learner", "tests/system"})
"""Folders of folders, with one file besides: what their folders share."""
SMALL = frozenset(
    {
        "asyncrl.cli.rollouts.command",
        "asyncrl.core.metrics.page",
    }
)
"""Small files with one importer that stand alone on purpose: a command has a file of its own, and
the page of metrics is not loaded with them. A name goes with its file; none is added."""


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def rooms_over(sizes: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """Return the rooms of more lines than they may have, as sentences."""
    return [
        f"{room} has {lines} lines, at most {allowed.get(room, MAX_ROOM_LINES)}"
        for room, lines in sorted(sizes.items())
        if lines > allowed.get(room, MAX_ROOM_LINES)
    ]


def folders_off(files: Iterable[str], allowed: Mapping[str, int], alone: frozenset[str]) -> list[str]:
    """Return the folders with one file, or more than they may have, as sentences."""
    counts = Counter(file.rpartition("/")[0] for file in files if not file.endswith("/__init__.py"))
    return [
        f"{folder} has {count} files of Python, from 2 to {allowed.get(folder, MAX_FILES)}"
        for folder, count in sorted(counts.items())
        if count > allowed.get(folder, MAX_FILES) or (count == 1 and folder not in alone)
    ]


def small_files(sizes: Mapping[str, int], graph: Mapping[str, set[str]]) -> set[str]:
    """Return the modules under `MIN_LINES` lines that exactly one module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            importers[target].add(name)
    return {name for name, lines in sizes.items() if lines < MIN_LINES and len(importers[name]) == 1}


def test_no_room_of_asyncrl_is_too_large_to_know() -> None:
    sizes: Counter[str] = Counter()
    for name, path in find_modules(ROOT).items():
        if name.startswith("asyncrl."):
            sizes[".".join(name.split(".")[:2])] += lines_of(path)
    assert sizes["asyncrl.control"] > 5_000, "this is the repository"
    assert rooms_over(sizes, OVER_ROOM) == []


def test_no_folder_has_one_file_or_more_than_ten() -> None:
    paths = [path for top in (*PACKAGES, "tests", "tools") for path in (ROOT / top).rglob("*.py")]
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    assert len(files) > 1000, "this is the repository"
    assert folders_off(files, OVER_FOLDER, ALONE) == []


def test_a_small_file_with_one_importer_is_a_part_of_it() -> None:
    modules = find_modules(ROOT)
    graph = {name: imports_of(name, ast.parse(path.read_text()), modules) for name, path in modules.items()}
    sizes = {
        name: lines_of(path)
        for name, path in modules.items()
        if name.startswith(SHIPPED) and path.name not in ("__init__.py", "__main__.py")
    }
    assert small_files(sizes, graph) - SMALL == set(), "join each of these to the file that imports it"
    assert SMALL - small_files(sizes, graph) == set(), "these are joined, or have grown: take their names out"


def test_what_is_too_large_or_too_small_is_found() -> None:
    assert rooms_over({"a.b": 9_001, "a.c": 9_000}, {}) == ["a.b has 9001 lines, at most 9000"]
    assert rooms_over({"a.b": 9_001}, {"a.b": 9_001}) == []
    files = ["a/__init__.py", "a/b.py", *(f"c/{number}.py" for number in range(11))]
    assert folders_off(files, {}, frozenset({"a"})) == ["c has 11 files of Python, from 2 to 10"]
    assert folders_off(files, {"c": 11}, frozenset()) == ["a has 1 files of Python, from 2 to 10"]
    graph = {"a": {"b", "c"}, "d": {"c"}}
    assert small_files({"a": 59, "b": 59, "c": 59}, graph) == {"b"}
    assert small_files({"b": 60}, graph) == set()
