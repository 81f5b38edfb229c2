"""Statement coverage of production modules while seeds are played.

Owns the tracer, which Python keeps for each greenlet: each task of a world is given it at its beginning.
Counted are lines inside functions; those of a module's own body run at its import. `elsewhere.txt` names
functions that scenarios leave statements of, with unit tests that ran all of those when they were traced
(`elsewhere.py` writes it); it names no lines, so that an edit elsewhere in a file changes nothing.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.simulation.kernel import world

ROOT = Path(__file__).parents[3]
TABLE = Path(__file__).with_name("elsewhere.txt")
LEAST_OF_ALL, LEAST_OF_EACH = 0.85, 0.70


class Coverage:
    """Lines of some files that were run between `begin` and `end`."""

    def __init__(self, files: Iterable[str]) -> None:
        self._names = {str(ROOT / name): functions_of(ROOT / name) for name in files}
        self._lines = {path: set(names) for path, names in self._names.items()}
        self._run: defaultdict[str, set[int]] = defaultdict(set)

    def begin(self) -> None:
        """Trace this thread, and all tasks and threads that begin from now on."""
        world.TRACERS.append(self._enter)
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def end(self) -> None:
        """Trace no more."""
        world.TRACERS.remove(self._enter)
        threading.settrace(None)  # type: ignore[arg-type]
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if path not in self._lines:
            return None
        run = self._run[path]

        def note(frame: FrameType, event: str, arg: Any) -> Any:
            run.add(frame.f_lineno)
            return note

        return note

    def lines_run(self) -> dict[str, set[int]]:
        """Return, by file, the counted lines that were run."""
        return {
            str(Path(path).relative_to(ROOT)): lines & self._run[path] for path, lines in self._lines.items()
        }

    def shares(self) -> dict[str, tuple[int, int]]:
        """Return, by file, how many statements were run, and how many there are."""
        counts = {}
        for path, lines in self._lines.items():
            counts[str(Path(path).relative_to(ROOT))] = len(lines & self._run[path]), len(lines)
        return counts

    def missing(self) -> dict[str, list[tuple[str, str]]]:
        """Return, by file, the ranges of lines that were not run, each with its function's qualified name."""
        found: dict[str, list[tuple[str, str]]] = {}
        for path, lines in self._lines.items():
            name = str(Path(path).relative_to(ROOT))
            found[name] = []
            for first, last in ranges_of(lines - self._run[path], self._names[path]):
                told = f"{first}-{last}" if last > first else f"{first}"
                found[name].append((told, self._names[path][first]))
        return found


@cache
def functions_of(path: Path) -> dict[int, str]:
    """Return the lines of a file that hold statements of functions, with their qualified names."""
    found: dict[int, str] = {}
    waiting: list[tuple[CodeType, bool]] = [(compile(path.read_text(), str(path), "exec"), False)]
    while waiting:
        code, is_function = waiting.pop()
        if is_function:
            lines = {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
            found |= dict.fromkeys(lines, code.co_qualname.partition(".<locals>")[0])
        inner = (const for const in code.co_consts if isinstance(const, CodeType))
        # A class's body has a name without `<locals>` and no optimised locals.
        waiting += [(one, bool(one.co_flags & 0x2)) for one in inner]
    return found


def ranges_of(missing: set[int], names: Mapping[int, str]) -> list[tuple[int, int]]:
    """Return missing lines as ranges, each of one function, over lines that hold no statement."""
    ranges: list[tuple[int, int]] = []
    before = 0
    for line in sorted(names):
        if line in missing:
            goes_on = bool(ranges) and ranges[-1][1] == before and names[before] == names[line]
            ranges[-1:] = [(ranges[-1][0], line)] if goes_on else [*ranges[-1:], (line, line)]
        before = line
    return ranges


def read_tests() -> dict[tuple[str, str], tuple[str, ...]]:
    """Return ids of unit tests, by file and qualified name of a function that scenarios do not run whole."""
    found = {}
    for line in TABLE.read_text().splitlines():
        function, _, tests = line.partition(": ")
        path, _, name = function.partition("::")
        found[path, name] = tuple(tests.split())
    return found


def report(coverage: Coverage) -> tuple[list[str], bool]:
    """Return lines for a reader, and whether enough was run.

    Below each file stand the ranges that were not, with their function and the tests that run them.
    """
    shares, missing, tests = coverage.shares(), coverage.missing(), read_tests()
    lines, num_unnamed = [], 0
    for name, (num, total) in shares.items():
        lines.append(f"{num:5}/{total:<5} {num / total:4.0%}  {name}")
        for function in dict.fromkeys(function for _, function in missing[name]):
            ranges = [told for told, one in missing[name] if one == function]
            known = tests.get((name, function), ())
            num_unnamed += 0 if known else len(ranges)
            lines.append(f"        {function} {' '.join(ranges)}: {' '.join(known) or 'no test is named'}")
    num, total = (sum(one[at] for one in shares.values()) for at in (0, 1))
    num_ranges = sum(map(len, missing.values()))
    lines.append(
        f"{num:5}/{total:<5} {num / total:4.0%}  together; {num_ranges - num_unnamed} of {num_ranges}"
    )
    lines[-1] += " ranges that were not run have a test that is named"
    is_each = all(num >= LEAST_OF_EACH * total for num, total in shares.values())
    return lines, num >= LEAST_OF_ALL * total and is_each
