"""Any order of leases, pushes, failures, deaths and resumes keeps the ledger's promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.events import Event, pack, unpack
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import OPEN_STATES, Grant, State
from tests.buffer.parts import GROUP_BYTES, SETTINGS

REPLICAS = ("a", "b", "c")


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a model that knows what each lineage trained and what was handed out.

    `trunk` holds the tickets of every trained step of the current lineage; `abandoned` what the last
    resume cut off, as long as its replay must be exact.
    """

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_lag=st.integers(0, 2),
        ready_batches=st.integers(1, 2),
        spare_groups=st.integers(0, 4),
    )
    def start(self, groups_per_step: int, max_lag: int, ready_batches: int, spare_groups: int) -> None:
        self.settings = replace(
            SETTINGS,
            groups_per_step=groups_per_step,
            max_lag=max_lag,
            ready_batches=ready_batches,
            memory_bytes=(2 * groups_per_step + spare_groups) * GROUP_BYTES,
        )
        self.ledger = Ledger(self.settings)
        self.events: list[Event] = []
        self.now = 0.0
        self.handed: list[tuple[str, Grant]] = []
        self.trunk: list[list[int]] = []
        self.abandoned: dict[int, list[int]] = {}
        self.kept: list[int] = []
        self.ledger.describe_data(5, "digest")
        self.token = self.ledger.open("learner")
        self.version = self.ledger.register_version(self.token, 0)

    @property
    def state(self):
        return self.ledger.state

    # Replicas

    @rule(replica=st.sampled_from(REPLICAS), back=st.integers(0, 2), want=st.integers(0, 4))
    def lease(self, replica: str, back: int, want: int) -> None:
        version = max(1, self.version - back)
        served = self.state.versions.counted_step(version)
        before = {ticket.id: ticket.attempt for ticket in self.state.tickets.values()}
        for grant in self.ledger.lease(replica, version, want, self.now):
            ticket = self.state.tickets[grant.ticket]
            assert ticket.position // self.settings.groups_per_step - served <= self.settings.max_lag
            assert ticket.position >= self.settings.groups_per_step * self.state.steps_trained
            assert before.get(grant.ticket, 1) == grant.attempt
            self.handed.append((replica, grant))

    @rule(data=st.data(), is_constant=st.booleans(), num_bytes=st.sampled_from([1, GROUP_BYTES]))
    def push(self, data: st.DataObject, is_constant: bool, num_bytes: int) -> None:
        if not self.handed:
            return
        replica, grant = data.draw(st.sampled_from(self.handed))
        verdict = self.ledger.judge_push(replica, grant.ticket, grant.attempt)
        ticket = self.state.tickets.get(grant.ticket)
        is_held = ticket is not None and ticket.state is State.LEASED and ticket.attempt == grant.attempt
        assert (verdict == "welcome") == is_held
        if verdict != "welcome":
            return
        if is_constant:
            self.ledger.drop_constant(grant.ticket)
        else:
            self.ledger.store(grant.ticket, 10, num_bytes, (max(1, self.version - 1), self.version))
        assert self.ledger.judge_push(replica, grant.ticket, grant.attempt) in ("duplicate", "late")

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)
        leased = [ticket for ticket in self.state.tickets.values() if ticket.state is State.LEASED]
        assert all(ticket.deadline > self.now for ticket in leased)

    @rule(replica=st.sampled_from(REPLICAS), act=st.sampled_from(["renew", "release", "retire", "fail"]))
    def speak(self, replica: str, act: str) -> None:
        held = [(ticket.id, ticket.attempt) for ticket in self.state.leases.get(replica, {}).values()]
        old = [(grant.ticket, grant.attempt) for name, grant in self.handed[-4:] if name == replica]
        if act == "renew":
            lost = self.ledger.renew(replica, held + old, self.now)
            assert set(lost) == set(old) - set(held)
        elif act == "release":
            assert self.ledger.release(replica, held[:1] + old) <= len(held)
        elif act == "retire":
            self.ledger.retire(replica)
            assert replica not in self.state.leases
        elif held:
            assert self.ledger.fail(replica, *held[0])
            assert not self.ledger.fail(replica, *held[0])

    # Learner

    @rule(
        is_trained=st.booleans(),
        num_dropped=st.sampled_from([0, 0, 0, 1, 3]),
        reason=st.sampled_from(["stale", "guard"]),
    )
    def step(self, is_trained: bool, num_dropped: int, reason: str) -> None:
        step = self.state.steps_trained
        batch = self.ledger.reserve(self.token, step)
        if batch is None:
            return
        tickets = [ticket.id for ticket in batch]
        assert tickets == sorted(set(tickets))
        assert self.ledger.reserve(self.token, step) == batch
        if step in self.abandoned:
            assert tickets == self.abandoned[step], "a replay trains the same groups at the same step"
        if not is_trained:
            return
        dropped = tickets[:num_dropped]
        self.ledger.trained(self.token, step, [(ticket, reason) for ticket in dropped])
        self.ledger.trained(self.token, step, [])
        if dropped and step in self.abandoned:
            self.abandoned = {}
        self.trunk.append(tickets[num_dropped:])
        self.version = self.ledger.register_version(self.token, step + 1)

    @rule()
    def checkpoint(self) -> None:
        step = self.state.steps_trained
        self.kept = sorted({*self.kept, step})[-2:]
        self.ledger.checkpointed(self.token, step, "digest", self.kept)

    @rule(data=st.data())
    def die_and_resume(self, data: st.DataObject) -> None:
        choices = [*self.kept, *([0] if self.state.floor_step == 0 else [])]
        step = data.draw(st.sampled_from(choices))
        replayed = self.ledger.tickets_from(step)
        num_lost = data.draw(st.sampled_from([0, 0, 0, 1, len(replayed)]))
        missing = [ticket.id for ticket in replayed[:num_lost]]
        cut = {at: list(tickets) for at, tickets in enumerate(self.trunk) if at >= step}
        self.token = self.ledger.open("successor")
        self.ledger.resume(self.token, step, missing)
        still_exact = {at: tickets for at, tickets in self.abandoned.items() if at >= step}
        self.abandoned = still_exact | {at: tickets for at, tickets in cut.items() if tickets}
        if missing:
            self.abandoned = {}
        self.kept = [kept for kept in self.kept if kept <= step]
        self.trunk = self.trunk[:step]
        self.version = self.ledger.register_version(self.token, step)

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """The guard goes back: with another learning rate, or without some groups of the batch at hand."""
        failed = self.state.steps_trained
        batch = self.ledger.reserve(self.token, failed)
        choices = [*self.kept, *([0] if self.state.floor_step == 0 else [])]
        if batch is None or not choices:
            return
        step = data.draw(st.sampled_from(choices))
        refused = [ticket.id for ticket in batch][: data.draw(st.sampled_from([0, 1, 3]))]
        cut = {at: list(tickets) for at, tickets in enumerate(self.trunk) if at >= step and tickets}
        note = {"num_rollbacks": float(failed)}
        for _ in range(2):  # the answer to the first call may be lost
            self.ledger.resume(self.token, step, is_fork=not refused, note=note, refused=refused)
        assert self.state.note == note
        self.abandoned = {} if failed in self.abandoned and refused else self.abandoned
        still_exact = {at: tickets for at, tickets in self.abandoned.items() if at >= step}
        self.abandoned = still_exact | cut
        self.kept = [kept for kept in self.kept if kept <= step]
        self.trunk = self.trunk[:step]
        for number in range(1, self.version + 1) if not refused else ():
            assert self.state.versions.counted_step(number) <= step, "it shares no step beyond the fork"
        self.version = self.ledger.register_version(self.token, step)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """The service comes back and finds a payload missing."""
        self.now += 100.0
        self.ledger = Ledger.replay(self.settings, self._all_events())
        waiting = [
            ticket for ticket in self.state.tickets.values() if ticket.state in (State.STORED, State.RESERVED)
        ]
        lost = data.draw(st.sampled_from([None, *[ticket.id for ticket in waiting]]))
        if lost is not None:
            self.abandoned = {} if self.state.tickets[lost].state is State.RESERVED else self.abandoned
            self.ledger.lose_payload(lost)
        self.ledger.restart(self.now)

    # Promises

    def _all_events(self) -> list[Event]:
        self.events += self.ledger.drain_events()
        return self.events

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "ledger"):
            assert take_census(self.state).residue == 0

    @invariant()
    def no_group_is_trained_twice_in_a_lineage(self) -> None:
        if hasattr(self, "ledger"):
            trained = [ticket for tickets in self.trunk for ticket in tickets]
            assert len(trained) == len(set(trained))
            assert len(trained) == take_census(self.state).trained

    @invariant()
    def indexes_agree_with_the_tickets(self) -> None:
        if not hasattr(self, "ledger"):
            return
        tickets = self.state.tickets.values()
        for state in State:
            assert self.state.counts[state] == sum(ticket.state is state for ticket in tickets)
        assert sorted(self.state.issued_heap) == [
            ticket.id for ticket in tickets if ticket.state is State.ISSUED
        ]
        assert sorted(self.state.stored_heap) == [
            ticket.id for ticket in tickets if ticket.state is State.STORED
        ]
        assert self.state.held_bytes == sum(ticket.num_bytes for ticket in tickets if ticket.is_held)
        assert self.state.memory_bytes <= self.settings.memory_bytes

    @precondition(lambda self: hasattr(self, "ledger"))
    @rule()
    def the_next_step_can_always_be_trained(self) -> None:
        """Liveness: with a willing replica and learner the next step comes, whatever happened before."""
        ledger = Ledger.replay(self.settings, self._all_events())
        step, now = ledger.state.steps_trained, self.now
        version = ledger.register_version(self.token, step)
        for _ in range(200):
            if ledger.reserve(self.token, step) is not None:
                ledger.trained(self.token, step)
                return
            now += self.settings.lease_s + 1.0
            ledger.expire(now)
            for grant in ledger.lease("willing", version, 1, now):
                ledger.store(grant.ticket, 10, self.settings.max_group_bytes, (version, version))
        raise AssertionError(f"step {step} is never trained: {take_census(ledger.state)}")

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        events = [unpack(pack(event)) for event in self._all_events()]
        assert Ledger.replay(self.settings, events).state.as_values() == self.state.as_values()
        opened = sum(ticket.state in OPEN_STATES for ticket in self.state.tickets.values())
        assert opened == self.state.num_open
        self.the_next_step_can_always_be_trained()


LedgerMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
test_the_ledger_keeps_its_promises = LedgerMachine.TestCase


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_ledger_keeps_its_promises_over_a_hundred_thousand_transitions() -> None:
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=1500,
            stateful_step_count=100,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
