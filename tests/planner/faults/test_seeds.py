"""Whole runs under faults: every promise is kept, and a seed always makes the same history."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asyncrl.planner.faults.command import main
from asyncrl.planner.faults.run import Outcome, play
from asyncrl.planner.faults.scenario import AMBUSH, KINDS, WEATHERS, draw_scenario

NUM_SEEDS, NUM_LONG_SEEDS = 36, 1500


def broken(outcomes: list[Outcome]) -> list[str]:
    return [
        f"python -m asyncrl.planner.faults {one.scenario.seed}: {one.violation}"
        for one in outcomes
        if one.violation
    ]


def test_runs_under_faults_keep_every_promise_and_come_to_their_end():
    outcomes = [play(seed) for seed in range(NUM_SEEDS)]
    assert broken(outcomes) == []
    tally = sum((one.tally for one in outcomes), start=outcomes[0].tally.__class__())
    pushes, evaluations = ("stored", "duplicate", "late"), ("done", "refused", "pinned", "unpinned")
    seen = [f"push/{one}" for one in pushes] + [f"evaluations/{one}" for one in evaluations]
    for what in ("steps", "swaps", "tokens_masked", *seen):
        assert tally[what] > 0, f"no seed has seen {what}: the scenarios are too tame"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_more_than_a_thousand_seeds_keep_every_promise():
    outcomes = [play(seed) for seed in range(NUM_LONG_SEEDS)]
    assert broken(outcomes) == []
    assert sum(one.tally["steps"] for one in outcomes) > 5 * NUM_LONG_SEEDS


def test_the_same_seed_makes_the_same_history():
    first, second, other = play(5), play(5, keeps_trace=True), play(6)
    assert (first.digest, first.num_events) == (second.digest, second.num_events)
    assert first.digest != other.digest
    assert second.trace, "the trace is kept where it is asked for"


@pytest.mark.long
def test_a_seed_makes_the_same_history_in_another_process():
    """Whatever the hashes of texts are there."""
    digests = set()
    for hash_seed in ("1", "2"):
        code = "from asyncrl.planner.faults.run import play; print([play(seed).digest for seed in range(20)])"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(found.stdout)
    assert digests == {f"{[play(seed).digest for seed in range(20)]}\n"}


def test_a_seed_is_replayed_with_one_command(capsys):
    assert main(["7", "--lines", "3"]) == 0
    told = capsys.readouterr().out
    assert "seed 7:" in told and play(7).digest in told and "every promise was kept" in told


def test_scenarios_have_every_kind_of_fault_and_all_of_them_end():
    scenarios = [draw_scenario(seed) for seed in range(300)]
    kinds = {strike.kind for one in scenarios for strike in one.strikes}
    assert kinds == (set(KINDS) - {"weather"}) | set(WEATHERS) | {AMBUSH}
    assert max(one.calm_at for one in scenarios) < 60.0
    assert {one.policy for one in scenarios} == {"mask", "drop", "wait"}
    assert draw_scenario(3) == draw_scenario(3)
