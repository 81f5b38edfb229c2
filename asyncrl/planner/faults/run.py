"""Plays a seed: builds the run, lets it happen, and tells what came of it.

Invariant: the same seed gives the same trace, in any process and on any machine with the same code.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from asyncrl.planner.faults.checks.violation import Violation
from asyncrl.planner.faults.cluster import Cluster
from asyncrl.planner.faults.scenario import Scenario, draw_scenario

SETTLE_S = 150.0
"""Once nothing disturbs a run any more, it ends within so many virtual seconds."""


@dataclass(frozen=True)
class Outcome:
    """What came of a seed.

    Attributes:
        violation: The first promise that was broken, or None.
        digest: Of the trace. virtual_s: When it ended.
        tally: What the observer counted. lag_max: Of all tokens that were trained, by content.
        trace: The lines, if they were asked for.
    """

    scenario: Scenario
    violation: Violation | None
    digest: str
    virtual_s: float
    num_events: int
    lag_max: int
    tally: Counter[str] = field(default_factory=Counter)
    trace: tuple[str, ...] = ()


def play(seed: int, keeps_trace: bool = False) -> Outcome:
    """Simulate the scenario of a seed."""
    return play_scenario(draw_scenario(seed), keeps_trace)


def play_scenario(scenario: Scenario, keeps_trace: bool = False) -> Outcome:
    """Simulate a scenario to its end, or to the first promise that is broken."""
    cluster = Cluster(scenario, keeps_trace)
    violation = None
    with _silence():
        try:
            _play_out(cluster)
        except Violation as found:
            violation = found
            cluster.note("VIOLATION", str(found))
        finally:
            cluster.close()
    return Outcome(
        scenario,
        violation,
        cluster.digest,
        cluster.world.now,
        cluster.world.num_events,
        cluster.observer.lag_max,
        cluster.observer.tally,
        tuple(cluster.lines),
    )


def _play_out(cluster: Cluster) -> None:
    until_s = cluster.scenario.calm_at + SETTLE_S
    try:
        has_ended = cluster.run(until_s)
    except (AssertionError, LookupError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, Violation):
            raise
        raise Violation("bug", f"{type(error).__name__}: {error}") from error
    if cluster.supervisor.given_up is not None:
        raise Violation("live", f"the run is given up: {cluster.supervisor.given_up.reason}")
    if not has_ended:
        raise Violation("live", f"{cluster.unsettled}, {SETTLE_S:g} s after the last fault")
    cluster.check_end()


@contextmanager
def _silence() -> Iterator[None]:
    """Keep what services log of faults to ourselves: thousands of lines per seed."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
