"""The breaker of data sources: leases while a source fails, and the account of every ticket."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.buffer.client import ReplicaClient
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.commands import leases
from asyncrl.buffer.ledger.events import Event
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import Grant, State, Ticket
from asyncrl.buffer.rules import breaker
from asyncrl.buffer.rules.breaker import FIRST_PAUSE_S, MIN_FAILED
from asyncrl.core.obstacle import ADVISORY, Cause
from tests.buffer.ledger.parts.ledger_runs import Run
from tests.buffer.parts import make_store, serving

BAD, WELL = 0, 1


class Mixed(Run):
    """Two data sources, and a learner that takes what there is."""

    def __init__(self, weights: Sequence[float] = (1.0, 1.0), **changes: object) -> None:
        super().__init__(**changes)
        self.ledger = Ledger(self.ledger.settings)
        self.state = self.ledger.state
        self.ledger.breaker.names = ("sandboxed", "plain")
        self.ledger.describe_data(100 * len(weights), "digest", [(100, weight) for weight in weights])
        self.token = self.ledger.open("learner")
        self.version = self.ledger.register_version(self.token, 0)

    def come_in(self, grant: Grant) -> None:
        self.ledger.take_in(grant.ticket, 10, 100, (self.version,))

    def fail(self, grant: Grant, cause: str = "infrastructure") -> None:
        assert self.ledger.fail("a", grant.ticket, grant.attempt, cause, "no sandbox", self.now)

    def train_complete(self) -> None:
        while self.ledger.reserve(self.token, step := self.state.steps_trained, self.now) is not None:
            self.ledger.trained(self.token, step, [])
            self.version = self.ledger.register_version(self.token, step + 1)

    def play(self, num_groups: int) -> list[Grant]:
        """Let so many groups be tried, those of the bad source in vain."""
        played: list[Grant] = []
        while len(played) < num_groups:
            self.train_complete()
            granted = self.lease()
            assert granted, "somebody can be leased"
            played += granted
            (self.fail if granted[0].source == BAD else self.come_in)(granted[0])
        return played

    def open_bad(self) -> None:
        while not self.ledger.breaker.is_open(BAD):
            self.play(1)


def test_a_source_that_fails_gets_no_leases_and_the_others_train_on():
    run = Mixed()
    run.open_bad()
    assert {grant.source for grant in run.play(40)} == {WELL}
    assert run.state.steps_trained >= 19 and run.residue == 0
    held = [one for one in run.state.tickets.values() if one.state is State.ISSUED]
    assert held and {one.source for one in held} == {BAD}
    (told,) = run.ledger.breaker.obstacles()
    assert told.cause is Cause.SOURCE_PAUSED and told.cause in ADVISORY
    assert told.reason.startswith("no leases for data source 1 (sandboxed), tried every 5 s: ")
    assert told.reason.endswith(" groups failed by infrastructure: no sandbox")


def test_few_failures_or_those_of_other_causes_open_nothing():
    run = Mixed((1.0,), max_attempts=100)
    for _ in range(MIN_FAILED - 1):
        run.fail(run.lease()[0])
    for cause in ("", "environment", "reward", "timeout", "budget", "unheard of") * 4:
        run.fail(run.lease()[0], cause)
    assert not run.ledger.breaker.is_open(0)
    run.come_in(run.lease()[0])
    for _ in range(MIN_FAILED):
        run.play(0)
    run.fail(run.lease()[0])
    assert run.ledger.breaker.is_open(0)


def test_one_group_at_a_time_probes_an_open_source_and_the_pause_grows():
    run = Mixed((1.0,), max_attempts=100)
    while not run.ledger.breaker.is_open(0):
        run.fail(run.lease()[0])
    for number in range(9):
        pause_s = min(FIRST_PAUSE_S * 2**number, breaker.MAX_PAUSE_S)
        assert run.ledger.breaker.next_probe(run.now) == run.now + pause_s
        run.now += pause_s / 2
        assert run.lease(4) == [], "before the pause is over"
        run.now += pause_s / 2
        (probe,) = run.lease(4)
        run.fail(probe)


def test_a_probe_that_is_lost_is_followed_by_another_and_one_that_comes_in_ends_it():
    run = Mixed((1.0,), max_attempts=100)
    before = run.lease(1)
    while not run.ledger.breaker.is_open(0):
        run.fail(run.lease()[0])
    run.fail(before[0])  # leased before it opened: says nothing new
    run.now += FIRST_PAUSE_S
    (probe,) = run.lease(4)
    run.ledger.release("a", [(probe.ticket, probe.attempt)])
    (again,) = run.lease(4)
    assert again.ticket == probe.ticket
    run.come_in(again)
    assert run.ledger.breaker.obstacles() == [] and len(run.lease(3)) == 3


def test_with_every_source_open_the_run_waits_says_so_and_goes_on():
    run = Mixed(max_attempts=100)
    while len({0, 1} - set(run.ledger.breaker._open)):
        run.fail(run.lease()[0])
    assert run.lease(4) == []
    num_drawn = run.state.num_drawn
    assert run.lease(4) == [] and run.state.num_drawn == num_drawn, "nothing is drawn in vain"
    (told,) = run.ledger.breaker.obstacles()
    assert told.cause is Cause.SOURCES_PAUSED and told.cause not in ADVISORY
    assert "(sandboxed)" in told.reason and "(plain)" in told.reason
    run.now += FIRST_PAUSE_S
    probes = run.lease(4)
    assert sorted(one.source for one in probes) == [BAD, WELL]
    for probe in probes:
        run.come_in(probe)
    assert not run.ledger.breaker.is_open(0) and run.residue == 0


def test_with_every_source_open_a_probe_has_nothing_issued_ahead_beside_it(monkeypatch: pytest.MonkeyPatch):
    run = Mixed(shares_prefixes=True)
    while len({0, 1} - set(run.ledger.breaker._open)):
        run.fail(run.lease()[0])
    run.now += FIRST_PAUSE_S
    num_issued, issue = run.state.num_issued, run.ledger._issue_new

    def issue_few(position: int, now: float) -> Ticket:
        assert run.state.num_issued < num_issued + 100, "it would go on for ever"
        return issue(position, now)

    monkeypatch.setattr(run.ledger, "_issue_new", issue_few)
    probes = run.lease(4)
    assert sorted(one.source for one in probes) == [BAD, WELL] and probes[0].attempt == 1
    assert run.residue == 0


def test_what_was_held_is_leased_within_the_bounds_once_its_source_is_well_again():
    run = Mixed(max_attempts=100, groups_per_step=4, memory_bytes=1 << 30)
    run.open_bad()
    run.play(100)
    run.train_complete()
    assert run.state.counts[State.ISSUED] > 50 and run.state.counts[State.STORED] == 0
    run.now += FIRST_PAUSE_S
    (probe,) = run.lease()
    run.come_in(probe)
    granted = run.lease(1000)
    assert len(granted) == 7, "of two steps, less the one that is stored: rule (a)"
    places = [run.state.tickets[one.ticket].position - 4 * run.state.steps_trained for one in granted]
    assert places == list(range(1, 8)), "each has a place of its own: rule (b)"
    for grant in granted[:3]:
        run.come_in(grant)
    run.ledger.release("a", [(one.ticket, one.attempt) for one in granted[3:]])
    assert len(run.lease(1000)) == 4, "rule (c): what was begun goes on, and nothing new"


def test_what_is_held_waits_for_its_source_and_the_oldest_beyond_a_number_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(leases, "MAX_HELD", 5)
    run = Mixed(max_attempts=100)
    run.open_bad()
    run.play(60)
    held = sorted(one.id for one in run.state.tickets.values() if one.state is State.ISSUED)
    dropped = [one for one in run.state.tickets.values() if one.state is State.DROPPED]
    assert len(held) == 5 and len(dropped) > 10
    assert {(one.source, one.reason.value) for one in dropped if one.reason} == {(BAD, "infrastructure")}
    assert max(one.id for one in dropped) < held[0] and run.residue == 0
    run.train_complete()
    run.now += FIRST_PAUSE_S
    (probe,) = run.lease()
    assert probe.ticket == held[0]


def test_a_group_is_tried_a_bounded_number_of_times_and_dropped_with_its_last_reason():
    store = make_store(max_attempts=3)
    ledger = store.ledger
    ledger.describe_data(100, "digest")
    ledger.register_version(ledger.open("learner"), 0)
    for cause in ("", "infrastructure", "timeout"):
        (grant,) = ledger.lease("a", 1, 1, 0.0)
        assert grant.ticket == 1
        store.fail("a", grant.ticket, grant.attempt, "RewardError: late", cause, 0.0)
    ticket = ledger.state.tickets[1]
    assert (ticket.state, ticket.reason and ticket.reason.value) == (State.DROPPED, "timeout")
    assert take_census(ledger.state).dropped == {"timeout": 1}
    assert store.counters["failures/timeout"] == store.counters["failures/infrastructure"] == 1


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_every_ticket_is_accounted_and_the_run_never_stands(seed: int):
    dice = random.Random(seed)
    run = Mixed((1.0, 3.0, 1.0), max_attempts=2)
    past: list[Event] = []
    held: list[Grant] = []
    for _ in range(400):
        is_bad = {source: dice.random() < 0.7 for source in range(3)}
        for grant in held:
            (run.fail if is_bad[grant.source] else run.come_in)(grant)
        run.train_complete()
        run.now += dice.choice((0.0, 1.0, 400.0))
        held = run.lease(dice.randrange(1, 4))
        if not held:
            run.now += breaker.MAX_PAUSE_S
            held = run.lease()
            assert held, "after the longest pause somebody may be leased"
        assert run.residue == 0
        past += run.ledger.drain_events()
    assert run.state.steps_trained > 10
    assert Ledger.replay(run.ledger.settings, past).state.as_values() == run.state.as_values()


def test_a_replica_that_waits_gets_the_probe_when_the_pause_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr("asyncrl.buffer.service.STATUS_EVERY_S", 3600.0)
    store = make_store(max_attempts=100, lease_s=3600.0)
    ledger: Any = store.ledger
    ledger.describe_data(100, "digest")
    ledger.register_version(ledger.open("learner"), 0)
    with serving(store) as service:

        async def work() -> int:
            client = ReplicaClient(service.address, "rollout.0", 60.0)
            try:
                for _ in range(MIN_FAILED):
                    (grant,) = (await client.lease(1, 1, 0.0)).grants
                    await client.fail(grant.ticket, grant.attempt, "no sandbox", "infrastructure")
                assert [one.cause for one in service.status().obstacles] == [Cause.SOURCES_PAUSED]
                async with asyncio.timeout(20.0):  # the wait itself would end much later
                    return len((await client.lease(1, 4, 55.0)).grants)
            finally:
                client.close()

        assert asyncio.run(work()) == 1
