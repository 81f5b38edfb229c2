"""Seeds of every scope and class of faults: no promise is broken, and a seed is always the same."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from tests.simulation.command import main, play_seeds
from tests.simulation.outcome import Outcome
from tests.simulation.scopes import SCOPES

CASES = [(scope.name, faults) for scope in SCOPES.values() for faults in scope.classes]
NUM_SEEDS, NUM_SAME, NUM_LONG_SEEDS = 1, 4, 1500
LEAST_EVENTS = 300
DIGESTS = """
import logging
from tests.simulation.command import play_seeds
from tests.simulation.scopes import SCOPES
logging.getLogger().setLevel(logging.CRITICAL)
print([one.trace for name in sorted(SCOPES) for one in play_seeds(SCOPES[name], range(4))])
"""


def broken(outcomes: list[Outcome]) -> list[str]:
    return [f"--faults {one.faults} --trace {one.seed}: {one.broken}" for one in outcomes if one.broken]


@pytest.mark.parametrize(("scope", "faults"), CASES)
def test_seeds_keep_every_promise(scope: str, faults: str) -> None:
    outcomes = list(play_seeds(SCOPES[scope], range(NUM_SEEDS), faults))
    assert broken(outcomes) == []
    assert all(one.num_events > LEAST_EVENTS for one in outcomes), "something happens in every seed"


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("scope", SCOPES)
def test_more_than_a_thousand_seeds_keep_every_promise(scope: str) -> None:
    outcomes = list(play_seeds(SCOPES[scope], range(NUM_LONG_SEEDS)))
    assert broken(outcomes) == []


@pytest.mark.long
def test_a_seed_is_the_same_in_every_process_whatever_the_hashes_of_texts_are_there() -> None:
    """Here hashes of texts are what this process has drawn, or was told."""
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") == "77" else "77"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", DIGESTS]
    there = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    here = [one.trace for name in sorted(SCOPES) for one in play_seeds(SCOPES[name], range(NUM_SAME))]
    assert there.communicate(timeout=200)[0].strip() == str(here)
    assert len(set(here)) == NUM_SAME * len(SCOPES)


def test_a_seed_is_the_same_whether_others_were_played_before_it() -> None:
    for scope in SCOPES.values():
        again = next(play_seeds(scope, range(1, 2)))
        behind = list(play_seeds(scope, range(2)))[1]
        assert (again.trace, again.num_events) == (behind.trace, behind.num_events)


def test_the_command_tells_of_broken_promises_by_its_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2"]) == 0
    assert "0 broke a promise" in capsys.readouterr().out
    assert main(["--seeds", "2", "--mutant", "digests"]) == 1
    assert "other bytes" in capsys.readouterr().out
    assert main(["--trace", "0", "--faults", "calm"]) == 0
    assert "start publisher.0" in capsys.readouterr().out


def test_the_command_leaves_the_log_of_its_process_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger().level
    assert main(["--seeds", "1"]) == 0
    assert logging.getLogger().level == level, "what later tests of this process look for would be silenced"
