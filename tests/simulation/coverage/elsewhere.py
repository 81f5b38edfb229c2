"""The writer of `elsewhere.txt`: the unit tests that run the statements that scenarios leave.

`python -m tests.simulation.coverage.elsewhere FOLDER [arguments of pytest]` keeps in FOLDER the lines that
200 seeds of each scope leave (`left.json`, played once) and those that each test ran (`run.json`, to which
each call adds). A service of a fixture that several tests share counts for the first of them. A function gets
a row if tests together run all that is left of it; the others are printed.
Tests that draw what they do are left out: another time they run other lines.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

import pytest

from tests.simulation.command import play_seeds
from tests.simulation.coverage.measure import ROOT, TABLE, Coverage, functions_of
from tests.simulation.scopes import SCOPES

Lines = dict[str, set[str]]
"""By file, each as its function and how far down in it, which an edit elsewhere leaves as it is."""

FILES = tuple(dict.fromkeys(name for scope in SCOPES.values() for name in scope.files))
NUM_SEEDS = 200


def find_left() -> Lines:
    """Return the lines that the seeds of some scope leave."""
    left: Lines = defaultdict(set)
    for scope in SCOPES.values():
        coverage = Coverage(scope.files)
        coverage.begin()
        for _ in play_seeds(scope, range(NUM_SEEDS)):
            pass
        coverage.end()
        for name, run in coverage.lines_run().items():
            left[name] |= _place(name, functions_of(ROOT / name).keys() - run)
    return left


def _place(path: str, lines: Iterable[int]) -> set[str]:
    """Return lines of a file in the form of `Lines`."""
    names = functions_of(ROOT / path)
    firsts: dict[str, int] = {}
    for line in sorted(names):
        firsts.setdefault(names[line], line)
    return {f"{names[line]}+{line - firsts[names[line]]}" for line in lines}


def _function(place: str) -> str:
    return place.partition("+")[0]


class Tracer:
    """A plugin of pytest that notes the lines of each test, whatever its parameters, with its fixtures."""

    def __init__(self) -> None:
        self.run: defaultdict[str, Lines] = defaultdict(lambda: defaultdict(set))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Trace one test."""
        if _draws(item):
            return (yield)
        coverage = Coverage(FILES)
        coverage.begin()
        try:
            return (yield)
        finally:
            coverage.end()
            for name, lines in coverage.lines_run().items():
                self.run[item.nodeid.partition("[")[0]][name] |= _place(name, lines)


def _draws(item: pytest.Item) -> bool:
    called = item.function.__code__.co_names if isinstance(item, pytest.Function) else ()
    is_machine = "run_state_machine_as_test" in called
    return is_machine or item.path.stem.endswith("_fuzz") or bool(item.get_closest_marker("hypothesis"))


def choose_tests(path: str, left: set[str], run: Mapping[str, Lines]) -> tuple[str, ...]:
    """Return the fewest tests that run all lines of a function of a file; none if some lines stay.

    Of as many tests those come first whose folder is nearer, then those that run fewer functions.
    """
    cheapest: dict[frozenset[str], tuple[int, int, str]] = {}
    for test, lines in run.items():
        if those := frozenset(left & lines.get(path, set())):
            cost = (_distance(path, test), _num_functions(lines), test)
            cheapest[those] = min(cost, cheapest.get(those, cost))
    if left - set().union(*cheapest):
        return ()
    for num in itertools.count(1):
        found = [
            tuple(cheapest[those] for those in some)
            for some in itertools.combinations(cheapest, num)
            if left == set().union(*some)
        ]
        if found:
            best = min(found, key=lambda some: (sum(one[0] for one in some), sum(one[1] for one in some)))
            return tuple(test for *_, test in best)
    raise AssertionError


def _distance(path: str, test: str) -> int:
    """Return how many words of a file's path are not in that of a test."""
    return len(set(path.removesuffix(".py").split("/")) - set(test.partition("::")[0].split("/")))


def _num_functions(lines: Lines) -> int:
    return sum(len(set(map(_function, run))) for run in lines.values())


def make_rows(left: Lines, run: Mapping[str, Lines]) -> tuple[list[str], list[str]]:
    """Return the rows of the table, and those of functions of which no tests run all that is left."""
    rows, without = [], []
    for path, lines in sorted(left.items()):
        for function in sorted(set(map(_function, lines))):
            those = {line for line in lines if _function(line) == function}
            if tests := choose_tests(path, those, run):
                rows.append(f"{path}::{function}: {' '.join(tests)}")
            else:
                stay = those.difference(*(one.get(path, set()) for one in run.values()))
                without.append(f"{path}::{' '.join(sorted(stay))}")
    return rows, without


def main(folder: Path, arguments: list[str]) -> int:
    """Play or read, trace, and write the table; return 1 if a function has no row."""
    folder.mkdir(parents=True, exist_ok=True)
    left_file, run_file = folder / "left.json", folder / "run.json"
    if not left_file.exists():
        logging.disable()
        _write(left_file, {"": find_left()})
        logging.disable(logging.NOTSET)
    tracer = Tracer()
    if arguments:
        pytest.main(["-n", "0", "-q", "-p", "no:cacheprovider", *arguments], plugins=[tracer])
    run = (_read(run_file) if run_file.exists() else {}) | tracer.run
    _write(run_file, run)
    rows, without = make_rows(_read(left_file)[""], run)
    TABLE.write_text("".join(f"{row}\n" for row in rows))
    print("\n".join(without) or "each function has a row")
    return int(bool(without))


def _read(path: Path) -> dict[str, Lines]:
    read = json.loads(path.read_text())
    return {one: {name: set(lines) for name, lines in by_file.items()} for one, by_file in read.items()}


def _write(path: Path, lines: Mapping[str, Lines]) -> None:
    plain = {one: {name: sorted(of) for name, of in by_file.items()} for one, by_file in lines.items()}
    path.write_text(json.dumps(plain))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
