"""Shape check of the code: prints its figures and fails on each exceeded limit (standard library only).

`python tools/shape.py FOLDER...` counts lines of functions, classes and files, files per folder, methods
per class, and how deep control flow is nested inside a function. Files under a folder `tests` may be longer,
and the classes in them. A module docstring must not begin with a question word.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 500
MAX_TEST_FILE_LINES = 600
MAX_NESTING = 3
MAX_CLASS_LINES = 300
MAX_METHODS = 30
LONG_CLASSES = {
    # One state machine each: nearly every method reads and changes the same two or three fields.
    "LedgerState": (400, 47),  # applies events to tickets
    "Coordination": (400, 42),  # members, rounds and the permits to swap
    "FleetMachine": (380, 40),  # units of services
    # One facade each: its state lies in parts that are classes already; a method is a command or a call.
    "Ledger": (370, 30),  # commands of the learner
    "RedisJournal": (360, 33),  # link, health, payloads; one protocol of turns over them
    "CoordinatorService": (330, 30),  # calls of peers to `Coordination`
    "Supervisor": (310, 25),  # a run from its begin to its end
    "ExperienceStore": (330, 30),  # ledger and journal, kept together
}
"""Classes that have one job and are longer: the most lines and methods they may have. None is added."""
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}
QUESTION_WORDS = {"what", "who", "how", "when", "where", "why", "which", "whether"}
"""First words of a module docstring that asks a question where it should say what the module is."""
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)
"""Statements that nest. `with` does not: it scopes, it does not branch."""
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class Function:
    """One function: where it stands, its lines, the depth of its control flow."""

    where: str
    name: str
    num_lines: int
    nesting: int


@dataclass(frozen=True)
class Class:
    """One class: where it stands, its lines and its methods."""

    where: str
    name: str
    num_lines: int
    num_methods: int

    @property
    def limits(self) -> tuple[int, int]:
        """The most lines and methods that it may have."""
        return LONG_CLASSES.get(self.name, (MAX_CLASS_LINES, MAX_METHODS))


@dataclass(frozen=True)
class File:
    """One file, its functions, its classes and the first word of its docstring."""

    path: Path
    num_lines: int
    functions: tuple[Function, ...]
    classes: tuple[Class, ...] = ()
    first_word: str = ""

    @property
    def is_test(self) -> bool:
        return "tests" in self.path.parts


def measure_file(path: Path) -> File:
    """Return the shape of the Python file `path`."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    functions = tuple(
        Function(f"{path}:{node.lineno}", node.name, node.end_lineno - node.lineno + 1, nesting_of(node.body))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    )
    classes = tuple(
        Class(f"{path}:{node.lineno}", node.name, node.end_lineno - node.lineno + 1, num_methods(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None
    )
    docstring = re.match(r"\w+", ast.get_docstring(tree) or "")
    return File(path, len(text.splitlines()), functions, classes, docstring.group() if docstring else "")


def num_methods(node: ast.ClassDef) -> int:
    """Return how many functions a class defines, properties among them."""
    return sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)


def nesting_of(body: Sequence[ast.AST]) -> int:
    """Return how deep control flow is nested in `body`; an `elif` is as deep as its `if`."""
    return max((_nesting(node) for node in body), default=0)


def _nesting(node: ast.AST) -> int:
    if isinstance(node, SCOPES):
        return 0  # measured by itself
    if isinstance(node, ast.If):
        is_elif = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        rest = nesting_of(node.orelse)
        return max(1 + nesting_of(node.body), rest if is_elif else 1 + rest)
    inner = nesting_of(list(ast.iter_child_nodes(node)))
    return inner + 1 if isinstance(node, BRANCHES) else inner


def violations(file: File) -> Iterator[str]:
    """Yield a sentence for each maximum that `file` exceeds."""
    limit = MAX_TEST_FILE_LINES if file.is_test else MAX_FILE_LINES
    if file.num_lines > limit:
        yield f"{file.path}: {file.num_lines} lines, at most {limit}"
    if file.path.stem in FORBIDDEN_NAMES:
        yield f"{file.path}: '{file.path.stem}' says nothing; name the noun that the module owns"
    if file.first_word.lower() in QUESTION_WORDS:
        yield f"{file.path}: its docstring begins with '{file.first_word}': begin with what the module is"
    for function in file.functions:
        name = f"{function.where}: {function.name}"
        if function.num_lines > MAX_FUNCTION_LINES:
            yield f"{name} has {function.num_lines} lines, at most {MAX_FUNCTION_LINES}"
        if function.nesting > MAX_NESTING:
            yield f"{name} nests {function.nesting} deep, at most {MAX_NESTING}"
    for one in () if file.is_test else file.classes:
        most_lines, most_methods = one.limits
        if one.num_lines > most_lines or one.num_methods > most_methods:
            size, most = f"{one.num_lines} lines, {one.num_methods} methods", f"{most_lines}, {most_methods}"
            yield f"{one.where}: {one.name} has {size}, at most {most}: take out a job that has its own state"


def figures(title: str, files: Sequence[File]) -> Iterator[str]:
    """Yield the figures of style.md for `files`, a line each."""
    functions = [function for file in files for function in file.functions]
    folders = Counter(str(file.path.parent) for file in files if file.path.name != "__init__.py")
    largest = max(folders, key=lambda folder: folders[folder], default="-")
    yield f"{title}: {len(files)} files, {len(functions)} functions"
    yield f"  function lines  {distribution([function.num_lines for function in functions])}"
    yield f"  class lines     {distribution([one.num_lines for file in files for one in file.classes])}"
    yield f"  file lines      {distribution([file.num_lines for file in files])}"
    yield f"  folder files    max {folders[largest]} ({largest})"
    yield f"  nesting         max {max((function.nesting for function in functions), default=0)}"


def distribution(values: Sequence[int]) -> str:
    """Return median, p90 and maximum in words."""
    return f"median {quantile(values, 50)}, p90 {quantile(values, 90)}, max {max(values, default=0)}"


def quantile(values: Sequence[int], percent: int) -> int:
    """Return the smallest value that at least `percent` of `values` do not exceed; 0 of none.

    >>> quantile([1, 2, 3, 4], 50)
    2
    """
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0


def main(folders: Sequence[str]) -> int:
    """Print the figures of the code and of the tests; return 1 if a maximum is exceeded."""
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    files = [measure_file(path) for path in paths]
    for title, is_test in (("code", False), ("tests", True)):
        print("\n".join(figures(title, [file for file in files if file.is_test is is_test])))
    found = [violation for file in files for violation in violations(file)]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
