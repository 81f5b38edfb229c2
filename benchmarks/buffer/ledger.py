"""The ledger alone: transitions per second, and what a group costs as the fleet grows.

Simulated replicas and a learner call the real commands: every group is leased, renewed once, pushed,
reserved, trained and folded away behind a checkpoint. A transition is an event that a command made
and that the ledger applied. One process, no journal, no network. Fleets take turns, and the fastest
round of each counts, in processor time. Growth with the fleet: 10,000 groups are in flight, shared by 10
or by up to 10,000 replicas. Growth with the work, which has no target: 10 groups in flight against
10,000, one replica each; there the processor's cache is too small for the tickets.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import platform
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import POLICIES, LedgerSettings
from benchmarks.harness.options import Verdict, judge, make_parser, report

TARGET_TRANSITIONS_PER_S = 50_000
TARGET_GROWTH = 1.2
GROUPS_PER_STEP = 64
STEPS_PER_CHECKPOINT = 5
NUM_IN_FLIGHT = 10_000


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    fleets: tuple[int, ...] = (10, 100, 1000, 10_000)
    num_groups: int = 20_000
    num_rounds: int = 5


QUICK = Sizes(fleets=(10, 10_000), num_groups=10_000, num_rounds=5)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("asyncrl bench ledger", __doc__, "two fleets, fewer groups: under a minute")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    given = parser.parse_args(arguments)
    return report(given, measure(QUICK if given.quick else Sizes()) | {"quick": given.quick}, table, check)


class Fleet:
    """Replicas, a learner and their ledger. `run` makes groups; the learner trains what is complete.

    Every lease is granted a renewal before its group is pushed. Groups finish in random order.
    """

    def __init__(self, num_replicas: int, num_in_flight: int, policy: str) -> None:
        # All groups may be in work at once: the bound is as wide as that.
        max_lag = num_in_flight // GROUPS_PER_STEP + 2
        self.ledger = Ledger(
            LedgerSettings(
                run_seed=0,
                groups_per_step=GROUPS_PER_STEP,
                max_lag=max_lag,
                ready_batches=1,
                memory_bytes=1 << 40,
                max_group_bytes=1 << 20,
                lease_s=1e6,
                max_attempts=3,
                policy=policy,
            )
        )
        self.ledger.describe_data(100_000, "benchmark")
        self.token = self.ledger.open("learner")
        self.version = self.ledger.register_version(self.token, 0)
        self.now = 0.0
        self._dice = random.Random(0)
        names = [f"replica-{number}" for number in range(num_replicas)]
        self._idle = deque(names * (num_in_flight // num_replicas))
        self._working: list[tuple[str, int, int]] = []
        self._lease_all()

    def run(self, num_groups: int) -> int:
        """Finish this many groups; return the number of events."""
        num_events = 0
        for _ in range(num_groups):
            self._finish_one()
            self._step()
            self._lease_all()
            num_events += len(self.ledger.drain_events())
            self.ledger.state.freed.clear()
            self.ledger.state.released.clear()
        return num_events

    def _finish_one(self) -> None:
        working = self._working
        at = int(self._dice.random() * len(working))
        working[at], working[-1] = working[-1], working[at]
        replica, ticket, version = working.pop()
        self.now += 1.0
        assert self.ledger.renew(replica, [(ticket, 1)], self.now) == []
        self.ledger.expire(self.now)
        assert self.ledger.judge_push(replica, ticket, 1) == "accepted"
        self.ledger.store(ticket, 4096, 1 << 15, (version, version))
        self._idle.append(replica)

    def _step(self) -> None:
        step = self.ledger.state.steps_trained
        if self.ledger.reserve(self.token, step, self.now) is None:
            return
        self.ledger.trained(self.token, step, lag_max=0)
        self.version = self.ledger.register_version(self.token, step + 1)
        if (step + 1) % STEPS_PER_CHECKPOINT == 0:
            self.ledger.checkpointed(self.token, step + 1, "benchmark", [step + 1])

    def _lease_all(self) -> None:
        while self._idle:
            grants = self.ledger.lease(self._idle[0], self.version, 1, self.now)
            if not grants:
                return
            self._working.append((self._idle.popleft(), grants[0].ticket, self.version))


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return all figures; the fleets take turns, so that a slow minute hits all of them."""
    fewest, most = sizes.fleets[0], sizes.fleets[-1]
    shapes = [(fleet, NUM_IN_FLIGHT, "mask") for fleet in sizes.fleets]
    shapes += [(fewest, fewest, policy) for policy in POLICIES]
    fleets = {f"{shape[0]}, {shape[1]}, {shape[2]}": Fleet(*shape) for shape in shapes}
    names = list(fleets)
    for shape, fleet in zip(shapes, fleets.values(), strict=True):
        fleet.run(2 * shape[1] + 1000)  # to the steady state
    seconds: dict[str, list[float]] = {name: [] for name in names}
    num_events = dict.fromkeys(names, 0)
    gc.collect()
    gc.freeze()
    for _ in range(sizes.num_rounds):
        for name, fleet in fleets.items():
            began = time.process_time()
            num_events[name] = fleet.run(sizes.num_groups)
            seconds[name].append(time.process_time() - began)
    gc.unfreeze()
    residue = sum(take_census(fleet.ledger.state).residue for fleet in fleets.values())
    return {
        "benchmark": "ledger",
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "sizes": dataclasses.asdict(sizes),
        "seconds": seconds,
        "transitions_per_s": {name: num_events[name] / min(seconds[name]) for name in names},
        "us_per_group": {name: min(seconds[name]) / sizes.num_groups * 1e6 for name in names},
        "growth": _ratio(seconds, f"{most}, {NUM_IN_FLIGHT}, mask", f"{fewest}, {NUM_IN_FLIGHT}, mask"),
        "growth_with_work": _ratio(seconds, f"{most}, {NUM_IN_FLIGHT}, mask", f"{fewest}, {fewest}, mask"),
        "residue": residue,
    }


def _ratio(seconds: dict[str, list[float]], above: str, below: str) -> float:
    return min(seconds[above]) / min(seconds[below])


def table(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"{'replicas, in flight, policy':<28}{'transitions/s':>15}{'us per group':>14}"]
    for name, speed in results["transitions_per_s"].items():
        lines.append(f"{name:<28}{speed:>15,.0f}{results['us_per_group'][name]:>14.1f}")
    fleets = results["sizes"]["fleets"]
    lines.append(f"cost of a group, {fleets[-1]} replicas against {fleets[0]}: {results['growth']:.2f}x")
    lines.append(f"cost of a group, {NUM_IN_FLIGHT} in flight against 10: {results['growth_with_work']:.2f}x")
    lines.append(f"residue: {results['residue']}")
    return "\n".join(lines)


def check(results: dict[str, Any]) -> Verdict:
    """Judge speed, growth and the account."""
    slowest = min(results["transitions_per_s"].values())
    return judge(
        {
            "transitions per second": slowest / TARGET_TRANSITIONS_PER_S,
            "cost per group as the fleet grows": TARGET_GROWTH / results["growth"],
            "residue": float(results["residue"] == 0),
        }
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
