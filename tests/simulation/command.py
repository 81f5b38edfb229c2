"""The command line of the simulator: plays seeds and prints those that broke a promise."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator

from tests.simulation.coverage.measure import Coverage, report
from tests.simulation.mutation import Mutant, mutated
from tests.simulation.outcome import Outcome
from tests.simulation.scopes import SCOPES, Scope


def main(argv: list[str]) -> int:
    """Return the exit status: 1 if a promise was broken, or too little was run for `--coverage`."""
    given = read_arguments(argv)
    scope = SCOPES[given.scope]
    if given.trace is not None:
        return print_trace(scope, given.trace, given.faults)
    mutant = scope.mutant(given.mutant) if given.mutant else None
    coverage = Coverage(scope.files) if given.coverage else None
    if coverage is not None:
        coverage.begin()
    seeds = range(given.first, given.first + given.seeds)
    num_broken = print_seeds(play_seeds(scope, seeds, given.faults, mutant), mutant is not None)
    if coverage is None:
        return int(num_broken > 0)
    coverage.end()
    lines, is_enough = report(coverage)
    print("\n".join(lines))
    return int(num_broken > 0 or not is_enough)


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--scope", choices=sorted(SCOPES), default="sync")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--faults", help="a class of faults; without it all in turn")
    parser.add_argument(
        "--mutant", help="take a guard of production out, and stop at the first broken promise"
    )
    parser.add_argument("--coverage", action="store_true", help="count the statements of production that ran")
    parser.add_argument("--trace", type=int, metavar="SEED", help="play one seed and print all of its trace")
    given = parser.parse_args(argv)
    scope = SCOPES[given.scope]
    if given.faults and given.faults not in scope.classes:
        parser.error(f"no class '{given.faults}' in scope {scope.name}: {', '.join(scope.classes)}")
    if given.mutant and given.mutant not in {one.name for one in scope.mutants}:
        names = ", ".join(one.name for one in scope.mutants)
        parser.error(f"no mutant '{given.mutant}' in scope {scope.name}: {names}")
    return given


def play_seeds(
    scope: Scope, seeds: Iterable[int], faults: str | None = None, mutant: Mutant | None = None
) -> Iterator[Outcome]:
    """Play seeds one after another; those of a mutant are of its class."""
    for seed in seeds:
        kind = faults or (mutant.faults if mutant is not None else scope.faults_of(seed))
        with mutated(mutant):
            outcome = scope.play(seed, kind, False)
        yield outcome


def print_seeds(outcomes: Iterator[Outcome], stops: bool) -> int:
    """Print the seeds that broke a promise and how fast all were played; return how many broke one."""
    began, num_seeds, num_broken, virtual_s = time.monotonic(), 0, 0, 0.0
    for outcome in outcomes:
        num_seeds, virtual_s = num_seeds + 1, virtual_s + outcome.virtual_s
        if outcome.broken:
            num_broken += 1
            print(f"seed {outcome.seed} ({outcome.faults}):", "\n    ".join(outcome.broken), flush=True)
            if stops:
                break
    minutes = (time.monotonic() - began) / 60
    rate = num_seeds / max(minutes, 1e-9)
    print(
        f"{num_seeds} seeds of {virtual_s / num_seeds:.0f} virtual s, {rate:.0f} a minute: "
        f"{num_broken} broke a promise"
    )
    return num_broken


def print_trace(scope: Scope, seed: int, faults: str | None) -> int:
    """Print a seed's scenario and all that happened in it."""
    kind = faults or scope.faults_of(seed)
    outcome = scope.play(seed, kind, True)
    print("\n".join(scope.describe(seed, kind)))
    print("\n".join(outcome.lines))
    print(f"trace {outcome.trace}, {outcome.virtual_s:.1f} virtual s, {outcome.num_events} events")
    print("\n".join(outcome.broken) or "no promise was broken")
    return int(bool(outcome.broken))
