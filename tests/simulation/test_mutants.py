"""Mutants: the simulator sees each guard of production that is taken out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulation.command import play_seeds
from tests.simulation.mutation import PRODUCTION, mutated
from tests.simulation.scopes import GENERAL, SCOPES
from tests.simulation.unit_mutants import UNIT_MUTANTS, UNIT_TESTS

ALL = [(scope.name, mutant.name) for scope in SCOPES.values() for mutant in scope.mutants]
QUICK = {
    ("sync", "digests"): 0,
    ("sync", "serving_told"): 1,
    ("sync", "rounds_once"): 0,
    ("sync", "abandoned"): 82,
    ("supervision", "kill_first"): 0,
    ("supervision", "fleet_saved"): 0,
    ("supervision", "promise_kept"): 17,
}
"""Mutants, and the seed that is played first."""
NUM_AIMED, NUM_GENERAL = 400, 2000
MUTANTS = [*(mutant for scope in SCOPES.values() for mutant in scope.mutants), *UNIT_MUTANTS]


def first_found(scope: str, name: str, first: int = 0) -> int | None:
    """Return the first seed, from `first` on and then from 0, at which a mutant breaks a promise."""
    mutant = SCOPES[scope].mutant(name)
    most = NUM_GENERAL if mutant.faults == GENERAL else NUM_AIMED
    seeds = [*range(first, most), *range(first)]
    outcomes = play_seeds(SCOPES[scope], seeds, None, mutant)
    return next((one.seed for one in outcomes if one.broken), None)


def test_mutants_patch_modules_of_production_only() -> None:
    for mutant in MUTANTS:
        for patch in mutant.patches:
            assert patch.module.split(".")[0] in PRODUCTION, mutant.name
            module = sys.modules[patch.module]
            assert "/tests/" not in str(module.__file__), mutant.name


def test_a_mutant_is_gone_after_its_seed() -> None:
    for mutant in MUTANTS:
        before = [vars(patch.target).get(patch.name) for patch in mutant.patches]
        with mutated(mutant):
            assert [vars(patch.target).get(patch.name) for patch in mutant.patches] != before
        assert [vars(patch.target).get(patch.name) for patch in mutant.patches] == before


@pytest.mark.parametrize(("scope", "name"), QUICK)
def test_a_guard_that_is_taken_out_is_missed(scope: str, name: str) -> None:
    assert first_found(scope, name, QUICK[scope, name]) is not None


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("scope", "name"), [one for one in ALL if one not in QUICK])
def test_every_guard_that_is_taken_out_is_missed(scope: str, name: str) -> None:
    assert first_found(scope, name) is not None


@pytest.mark.long
@pytest.mark.parametrize("name", UNIT_TESTS)
def test_a_guard_that_no_seed_misses_is_missed_by_its_unit_test(name: str) -> None:
    command = [sys.executable, "-m", "tests.simulation.unit_mutants", name]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == pytest.ExitCode.TESTS_FAILED, found.stdout
    assert "1 failed" in found.stdout, "the test itself, not its fixtures"
    assert {one.name for one in UNIT_MUTANTS} == set(UNIT_TESTS)
