"""Coverage: what the report names is there."""

from __future__ import annotations

import re

import pytest

from tests.simulation.command import play_seeds
from tests.simulation.coverage.elsewhere import NUM_SEEDS, choose_tests, make_rows
from tests.simulation.coverage.measure import ROOT, Coverage, functions_of, ranges_of, read_tests
from tests.simulation.scopes import SCOPES


def test_each_test_that_the_report_names_is_there_and_so_is_its_function() -> None:
    listed = {name for scope in SCOPES.values() for name in scope.files}
    names = {name: set(functions_of(ROOT / name).values()) for name in listed}
    tests = read_tests()
    assert len(tests) > 50
    for (path, function), ids in tests.items():
        assert function in names[path], f"{path} has no {function}"
        assert ids, f"no test is named for {function} of {path}"
        for one in ids:
            file, _, test = one.partition("::")
            assert re.search(rf"^(async )?def {test}\b", (ROOT / file).read_text(), re.M), one


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_each_function_of_weight_sync_that_its_seeds_leave_a_statement_of_has_a_row() -> None:
    scope = SCOPES["sync"]
    coverage = Coverage(scope.files)
    coverage.begin()
    for _ in play_seeds(scope, range(NUM_SEEDS)):
        pass
    coverage.end()
    left = {(path, function) for path, ranges in coverage.missing().items() for _, function in ranges}
    assert len(left) > 50, "it counts what is left"
    assert sorted(left - read_tests().keys()) == []


def test_the_fewest_tests_that_run_all_that_is_left_are_named_and_of_those_the_nearest() -> None:
    path = "learner/batch_fetcher.py"
    both, other = {path: {"f+1", "f+2"}}, {path: {"f+1", "f+2", "g+1"}}
    near, far = "tests/learner/test_intake.py::test_b", "tests/core/test_a.py::test_a"
    run = {near: both, far: both, "tests/learner/test_intake.py::test_a": other}
    assert choose_tests(path, {"f+1", "f+2"}, run) == (near,)
    halves = {near: {path: {"f+1"}}, far: {path: {"f+2"}}}
    assert set(choose_tests(path, {"f+1", "f+2"}, halves)) == {near, far}
    assert choose_tests(path, {"f+1", "f+3"}, halves) == ()
    rows, without = make_rows({path: {"f+1", "g+7"}}, halves)
    assert (rows, without) == ([f"{path}::f: {near}"], [f"{path}::g+7"])


def test_ranges_of_lines_end_with_their_function_and_with_a_line_that_was_run() -> None:
    names = {2: "a", 3: "a", 5: "a", 6: "a", 8: "b", 9: "b"}
    assert ranges_of({2, 3, 6, 8}, names) == [(2, 3), (6, 6), (8, 8)]
    assert ranges_of({3, 5}, names) == [(3, 5)]
    assert ranges_of(set(), names) == []
