"""Statement coverage of production modules while seeds are played.

Owns the tracer, which Python keeps for each greenlet: each task of a world is given it at its beginning.
Counted are lines inside functions; those of a module's own body run at its import.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.simulation.kernel import world

ROOT = Path(__file__).parents[2]
LEAST_OF_ALL, LEAST_OF_EACH = 0.85, 0.70


class Coverage:
    """Lines of some files that were run between `begin` and `end`."""

    def __init__(self, files: Iterable[str]) -> None:
        self._lines = {str(ROOT / name): lines_of(ROOT / name) for name in files}
        self._run: defaultdict[str, set[int]] = defaultdict(set)

    def begin(self) -> None:
        """Trace all tasks that begin from now on."""
        world.TRACERS.append(self._enter)
        sys.settrace(self._enter)

    def end(self) -> None:
        """Trace no more."""
        world.TRACERS.remove(self._enter)
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

    def shares(self) -> dict[str, tuple[int, int]]:
        """Return, by file, how many statements were run, and how many there are."""
        counts = {}
        for path, lines in self._lines.items():
            counts[str(Path(path).relative_to(ROOT))] = len(lines & self._run[path]), len(lines)
        return counts

    def missing(self) -> dict[str, list[str]]:
        """Return, by file, the ranges of lines that were not run."""
        found = {}
        for path, lines in self._lines.items():
            if ranges := ranges_of(lines - self._run[path], lines):
                found[str(Path(path).relative_to(ROOT))] = ranges
        return found


def lines_of(path: Path) -> set[int]:
    """Return the lines of a file that hold statements of functions."""
    found: set[int] = set()
    waiting: list[tuple[CodeType, bool]] = [(compile(path.read_text(), str(path), "exec"), False)]
    while waiting:
        code, is_function = waiting.pop()
        if is_function:
            found |= {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
        inner = (const for const in code.co_consts if isinstance(const, CodeType))
        # A class's body has a name without `<locals>` and no optimised locals.
        waiting += [(one, bool(one.co_flags & 0x2)) for one in inner]
    return found


def ranges_of(missing: set[int], lines: set[int]) -> list[str]:
    """Return missing lines as ranges, over lines that hold no statement."""
    ranges: list[list[int]] = []
    for line in sorted(lines):
        if line not in missing:
            ranges.append([])
        elif ranges and ranges[-1]:
            ranges[-1].append(line)
        else:
            ranges.append([line])
    return [f"{one[0]}-{one[-1]}" if len(one) > 1 else f"{one[0]}" for one in ranges if one]


def report(coverage: Coverage) -> tuple[list[str], bool]:
    """Return lines for a reader, and whether enough was run."""
    shares, missing = coverage.shares(), coverage.missing()
    lines = [
        f"{num:5}/{total:<5} {num / total:4.0%}  {name}  {' '.join(missing.get(name, []))}"
        for name, (num, total) in shares.items()
    ]
    num, total = (sum(one[at] for one in shares.values()) for at in (0, 1))
    lines.append(f"{num:5}/{total:<5} {num / total:4.0%}  together")
    is_each = all(num >= LEAST_OF_EACH * total for num, total in shares.values())
    return lines, num >= LEAST_OF_ALL * total and is_each
