"""The command that replays one seed, or searches many.

Prints the scenario, the trace and what came of it, and plays the seed twice: a second trace that differs is a
bug of the simulator. Exit status 1 for a broken promise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from asyncrl.planner.faults.run import Outcome, play, play_scenario
from asyncrl.planner.faults.scenario import Scenario

USUAL_TRACE = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.planner.faults", description=__doc__)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="so many from there on, without their traces")
    parser.add_argument("--lines", type=int, default=USUAL_TRACE, help="of the trace, from its end; 0: all")
    parser.add_argument("--shrink", action="store_true", help="leave out what the failure does not need")
    found = parser.parse_args(arguments)
    if found.seeds > 1:
        return _search(range(found.seed, found.seed + found.seeds))
    return _replay(found.seed, found.lines, found.shrink)


def _search(seeds: range) -> int:
    failed = []
    for seed in seeds:
        outcome = play(seed)
        if outcome.violation is not None:
            failed.append(seed)
            print(f"seed {seed}: {outcome.violation}", flush=True)
    print(f"{len(seeds)} seeds, {len(failed)} broke a promise")
    return 1 if failed else 0


def _replay(seed: int, num_lines: int, shrinks: bool) -> int:
    outcome = play(seed, keeps_trace=True)
    if shrinks and outcome.violation is not None:
        outcome = shrink(outcome)
    again = play_scenario(outcome.scenario)
    for line in outcome.trace[-num_lines:]:
        print(line)
    print("\n".join(outcome.scenario.describe()))
    print(
        f"{outcome.num_events} events in {outcome.virtual_s:.1f} virtual s, trace {outcome.digest}, "
        f"again {again.digest}"
    )
    print(f"largest lag trained {outcome.lag_max}; {dict(sorted(outcome.tally.items()))}")
    print(f"BROKEN: {outcome.violation}" if outcome.violation else "every promise was kept")
    assert outcome.digest == again.digest, (
        "the same seed made two histories: the simulator is not deterministic"
    )
    return 1 if outcome.violation else 0


def shrink(outcome: Outcome) -> Outcome:
    """Return a failure of the same promise with fewer faults, where there is one."""
    assert outcome.violation is not None, "only a failure can be shrunk"
    index = 0
    while index < len(outcome.scenario.strikes):
        smaller: Scenario = outcome.scenario.without(index)
        tried = play_scenario(smaller, keeps_trace=True)
        if tried.violation is not None and tried.violation.promise == outcome.violation.promise:
            outcome = tried
        else:
            index += 1
    return outcome
