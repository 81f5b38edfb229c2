"""Any order of leases, pushes, failures, deaths and resumes keeps the ledger's promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import POLICIES, Grant, State, Ticket
from asyncrl.core.errors import AsyncrlError, FencedError, LedgerError
from asyncrl.core.metrics.tallies import Tally
from tests.buffer.ledger.parts.ledger_model import (
    Model,
    Shadow,
    check_indexes,
    check_refused,
    drive_to_next_step,
)
from tests.buffer.ledger.parts.ledger_runs import GROUP_BYTES, SETTINGS

REPLICAS = ("a", "b", "c", "d")
done: Counter[str] = Counter()
"""Commands that were given and events that they made, over all examples."""


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a model that knows what each lineage trained and what was handed out."""

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_lag=st.integers(0, 3),
        ready_batches=st.integers(1, 2),
        spare_groups=st.integers(0, 4),
        policy=st.sampled_from(POLICIES),
        max_wait_s=st.sampled_from([1.0, 15.0]),
        max_attempts=st.integers(1, 3),
        shares_prefixes=st.booleans(),
    )
    def start(self, groups_per_step: int, spare_groups: int, **bounds: object) -> None:
        memory_bytes = (2 * groups_per_step + spare_groups) * GROUP_BYTES
        self.settings = replace(
            SETTINGS, groups_per_step=groups_per_step, memory_bytes=memory_bytes, **bounds
        )
        self.ledger = Ledger(self.settings)
        self.shadow = Shadow(self.settings, LedgerState(self.settings))
        self.model = Model()
        self.now = 0.0
        self.handed: list[tuple[str, Grant, int]] = []
        self.kept: list[int] = []
        self.complete: tuple[int, float] | None = None
        self.ledger.describe_data(5, "digest", [(2, 1.0), (3, 2.0)] if self.settings.shares_prefixes else ())
        self.token = self.ledger.open("learner")
        self.register(0)

    @property
    def state(self) -> LedgerState:
        return self.ledger.state

    def register(self, step: int) -> None:
        self.version = self.ledger.register_version(self.token, step)
        self.model.histories[self.version] = tuple(self.model.trunk)

    def refused(self, error: type[AsyncrlError], call: Callable[[], object]) -> None:
        self.shadow.follow(self.ledger)
        check_refused(self.ledger, error, call)

    # Replicas

    @rule(replica=st.sampled_from(REPLICAS), back=st.integers(0, 3), want=st.integers(0, 4))
    def lease(self, replica: str, back: int, want: int) -> None:
        version = max(1, self.version - back)
        served = self.state.versions.counted_step(version)
        before = {ticket.id: ticket.attempt for ticket in self.state.tickets.values()}
        num_issued = self.state.counts[State.ISSUED]
        grants = self.ledger.lease(replica, version, want, self.now)
        assert len(grants) <= max(want, 0)
        for grant in grants:
            ticket = self.state.tickets[grant.ticket]
            due = ticket.position // self.settings.groups_per_step
            assert due - served <= self.ledger.max_lag, "rule (b)"
            assert due >= self.state.steps_trained
            assert before.get(grant.ticket, 1) == grant.attempt == ticket.attempt
            num_older = sum(waiting < grant.ticket for waiting in self.state.issued_heap)
            assert num_older < (self.settings.groups_per_step if self.settings.shares_prefixes else 1)
            if grant.partial_attempt:
                partial = self.model.tokens[grant.ticket, grant.partial_attempt]
                oldest = min(self.model.true_step(number) for number in partial)
                assert due - oldest <= self.settings.max_lag, "partial tokens are in bound in their turn"
            self.handed.append((replica, grant, version))
        if len(grants) > num_issued and not self.state.num_missing:
            assert self.state.num_open <= (self.ledger.max_lag + 1) * self.settings.groups_per_step, "(a)"

    def draw_handed(self, data: st.DataObject) -> tuple[str, Grant, tuple[int, ...]] | None:
        """A grant of any age, and the versions that sampled its tokens."""
        if not self.handed:
            return None
        held = [one for one in self.handed if self.is_held(one[0], one[1])]
        is_late = not held or data.draw(st.sampled_from([False, False, False, True]))
        replica, grant, version = data.draw(st.sampled_from(self.handed[-12:] if is_late else held))
        low = max(1, version - data.draw(st.sampled_from([0, 0, 1, 3])))
        middle = data.draw(st.integers(low, self.version))
        partial = self.model.tokens.get((grant.ticket, grant.partial_attempt), ())
        return (
            replica,
            grant,
            tuple(sorted({*partial, low, middle, data.draw(st.sampled_from([low, self.version]))})),
        )

    @rule(data=st.data(), replica=st.sampled_from(REPLICAS), num_groups=st.integers(1, 6))
    def work(self, data: st.DataObject, replica: str, num_groups: int) -> None:
        """What happens all day: lease, push, train."""
        is_trained = data.draw(st.booleans())
        for _ in range(num_groups):
            self.lease(replica, data.draw(st.sampled_from([0, 0, 1])), 1)
            self.push(data, False, False)
            if is_trained:
                self.step(data, True)

    def is_held(self, replica: str, grant: Grant) -> bool:
        ticket = self.state.tickets.get(grant.ticket)
        if ticket is None or ticket.state is not State.LEASED:
            return False
        return (ticket.attempt, ticket.replica) == (grant.attempt, replica)

    @rule(data=st.data(), has_zero_variance=st.sampled_from([False, False, True]), is_large=st.booleans())
    def push(self, data: st.DataObject, has_zero_variance: bool, is_large: bool) -> None:
        drawn = self.draw_handed(data)
        if drawn is None:
            return
        replica, grant, versions = drawn
        verdict = self.ledger.judge_push(replica, grant.ticket, grant.attempt)
        assert (verdict == "accepted") == self.is_held(replica, grant)
        if verdict != "accepted":
            self.refused(LedgerError, lambda: self.ledger.drop_zero_variance(10**6))
            return
        if has_zero_variance:
            self.ledger.drop_zero_variance(grant.ticket)
        else:
            self.model.tokens[grant.ticket, grant.attempt] = versions
            num_bytes = GROUP_BYTES if is_large else 1
            self.ledger.store(grant.ticket, 10, num_bytes, (versions[0], versions[-1]))
        assert self.ledger.judge_push(replica, grant.ticket, grant.attempt) in ("duplicate", "late")

    @rule(data=st.data(), is_large=st.booleans())
    def store_partial(self, data: st.DataObject, is_large: bool) -> None:
        drawn = self.draw_handed(data)
        if drawn is None:
            return
        replica, grant, versions = drawn
        is_held, num_bytes = self.is_held(replica, grant), GROUP_BYTES if is_large else 1
        bounds = (versions[0], versions[-1])
        result = self.ledger.store_partial(replica, grant.ticket, grant.attempt, 5, num_bytes, bounds)
        assert (result == "late") == (not is_held)
        if result == "stored":
            self.model.tokens[grant.ticket, grant.attempt] = versions
            assert self.state.tickets[grant.ticket].partial_attempt == grant.attempt
        assert self.ledger.judge_push(replica, grant.ticket, grant.attempt) != "accepted"

    @rule(data=st.data(), is_large=st.booleans(), is_again=st.sampled_from([False, False, True]))
    def store_turns(self, data: st.DataObject, is_large: bool, is_again: bool) -> None:
        drawn = self.draw_handed(data)
        if drawn is None:
            return
        replica, grant, versions = drawn
        is_held, num_bytes = self.is_held(replica, grant), GROUP_BYTES if is_large else 1
        ticket = self.state.tickets.get(grant.ticket)
        before = ticket.partial if ticket is not None and is_held else None
        number = (before.num_records if before is not None else 0) + (not is_again)
        key = (replica, grant.ticket, grant.attempt)
        if is_again and is_held and (not number or (before and before.attempt != grant.attempt)):
            self.refused(LedgerError, lambda: self.ledger.store_turns(*key, number, 1, (1, 1)))
            return
        result = self.ledger.store_turns(*key, number, num_bytes, (versions[0], versions[-1]))
        assert (result == "late") == (not is_held)
        assert not is_held or (result == "duplicate") == is_again
        assert self.ledger.holds_lease(*key) == is_held, "the lease goes on"
        if result == "stored":
            known = self.model.tokens.get((grant.ticket, before.attempt), ()) if number > 1 and before else ()
            self.model.tokens[grant.ticket, grant.attempt] = tuple(sorted({*known, *versions}))
            assert ticket is not None and ticket.partial_attempt == grant.attempt

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)
        leased = [ticket for ticket in self.state.tickets.values() if ticket.state is State.LEASED]
        assert all(ticket.deadline > self.now for ticket in leased)

    @rule(replica=st.sampled_from(REPLICAS), act=st.sampled_from(["renew", "release", "deregister", "fail"]))
    def speak(self, replica: str, act: str) -> None:
        held = [(number, self.state.tickets[number].attempt) for number in self.state.leases.get(replica, ())]
        old = [(grant.ticket, grant.attempt) for name, grant, _ in self.handed[-4:] if name == replica]
        if act == "renew":
            lost = self.ledger.renew(replica, held + old, self.now)
            assert set(lost) == set(old) - set(held)
        elif act == "release":
            assert self.ledger.release(replica, held[:1] + old) <= len(held)
        elif act == "deregister":
            self.ledger.deregister(replica)
            assert replica not in self.state.leases
        elif held:
            assert self.ledger.fail(replica, *held[0])
            assert not self.ledger.fail(replica, *held[0])

    @rule(max_lag=st.integers(0, 8))
    def tighten(self, max_lag: int) -> None:
        if max_lag <= self.settings.max_lag:
            self.ledger.tighten(max_lag)
        else:
            self.refused(LedgerError, lambda: self.ledger.tighten(max_lag))

    @rule(replica=st.sampled_from(REPLICAS), is_done=st.booleans())
    def evaluate(self, replica: str, is_done: bool) -> None:
        if self.state.is_resumed:
            self.ledger.request_evaluation(self.token, self.state.steps_trained)
        order = self.ledger.evaluations.give(replica, self.version, None)
        if order is not None and is_done:
            assert self.ledger.evaluations.finish(
                order.id, self.version, {"score": Tally(1, 1.0)}, order.part
            )

    # Learner

    def reserve(self) -> list[Ticket] | None:
        """Reserve the next step and check what the policies promise of it."""
        step, state = self.state.steps_trained, self.state
        is_fresh = len(state.by_step.get(step, ())) < self.state.batch_size(step)
        before = {ticket.id for ticket in state.by_step.get(step, ())}
        num_open = state.num_open
        batch = self.ledger.reserve(self.token, step, self.now)
        assert state.num_open == num_open, "a dropped group's child takes its place"
        missing = self.state.batch_size(step) - len(state.by_step.get(step, ()))
        if batch is None:
            if missing <= state.counts[State.STORED]:
                self.check_waits(step)
            return None
        tickets = [ticket.id for ticket in batch]
        assert tickets == sorted(set(tickets)) and len(tickets) == self.state.batch_size(step)
        assert self.ledger.reserve(self.token, step, self.now) == batch
        fresh = [ticket for ticket in batch if ticket.id not in before]
        if is_fresh and self.settings.policy == "drop":
            assert all(self.is_whole(ticket, step) for ticket in fresh)
        if is_fresh and self.settings.policy == "wait":
            self.check_waited(step, max(ticket.id for ticket in fresh))
        return batch

    def is_whole(self, ticket: Ticket, step: int) -> bool:
        """Whether no token is over age, or the prompt is in its last generation."""
        lags = self.model.lags(self.ledger, ticket, step)
        is_last = ticket.generation + 1 >= self.settings.max_attempts
        return is_last or max(counted for counted, _ in lags) <= self.settings.max_lag

    def endangered(self, step: int) -> list[int]:
        """Groups in flight that are in bound for `step` and not for the next one."""
        found = []
        for replica, grant, version in self.handed:
            partial = self.model.tokens.get((grant.ticket, grant.partial_attempt), ())
            oldest = min(self.state.versions.counted_step(number) for number in (*partial, version))
            if self.is_held(replica, grant) and step - oldest == self.settings.max_lag:
                found.append(grant.ticket)
        return found

    def check_waits(self, step: int) -> None:
        """A complete batch waits only for groups in flight, and not for ever."""
        assert self.settings.policy == "wait" and self.endangered(step)
        if self.complete is None or self.complete[0] != step:
            self.complete = (step, self.now)
        assert self.now - self.complete[1] < self.settings.max_wait_s

    def check_waited(self, step: int, last: int) -> None:
        if any(number < last for number in self.endangered(step)):
            assert self.complete is not None and self.complete[0] == step
            assert self.now - self.complete[1] >= self.settings.max_wait_s

    @rule(data=st.data(), is_booked=st.sampled_from([True, True, False]))
    def step(self, data: st.DataObject, is_booked: bool) -> None:
        if not self.state.is_resumed:
            return
        step, model = self.state.steps_trained, self.model
        batch = self.reserve()
        if batch is None:
            self.refused(LedgerError, lambda: self.ledger.trained(self.token, step))
            return
        if step in model.replayed:
            assert [ticket.id for ticket in batch] == model.replayed[step], "ordered replay"
        stale, lag_max = self.mask(batch, step)
        if is_booked:
            guard = data.draw(st.sampled_from([[], [], [], [ticket.id for ticket in batch][:1]]))
            self.book(batch, stale, guard, lag_max)

    def mask(self, batch: list[Ticket], step: int) -> tuple[list[int], int]:
        """Mask as the learner does; return the groups without a token left, and the largest lag."""
        stale, entered = [], []
        for ticket in batch:
            lags = self.model.lags(self.ledger, ticket, step)
            kept = [true for counted, true in lags if counted <= self.settings.max_lag]
            assert all(true <= self.settings.max_lag for true in kept), "S3: by true lag"
            entered += [counted for counted, _ in lags if counted <= self.settings.max_lag]
            stale += [] if kept else [ticket.id]
        return stale, max(0, *entered, 0)

    def book(self, batch: list[Ticket], stale: list[int], guard: list[int], lag_max: int) -> None:
        step, model = self.state.steps_trained, self.model
        drops = dict.fromkeys(guard, "guard") | dict.fromkeys(stale, "stale")
        over = self.settings.max_lag + 1
        self.refused(LedgerError, lambda: self.ledger.trained(self.token, step, [], over))
        self.ledger.trained(self.token, step, list(drops.items()), lag_max)
        self.ledger.trained(self.token, step, [])
        if drops and step in model.replayed:
            model.replayed = {}
        is_refused = any(reason == "guard" for reason in drops.values())
        model.trunk.append(model.salt() if is_refused else model.trace(batch, list(drops)))
        model.booked.append([ticket.id for ticket in batch if ticket.id not in drops])
        self.register(step + 1)

    @rule()
    def checkpoint(self) -> None:
        if not self.state.is_resumed:
            return
        step = self.state.steps_trained
        self.kept = sorted({*self.kept, step})[-3:]
        self.ledger.checkpointed(self.token, step, "digest", self.kept)

    @rule(data=st.data(), num_openings=st.integers(1, 2))
    def die_and_resume(self, data: st.DataObject, num_openings: int) -> None:
        """A learner dies; its successor may die before it has resumed."""
        for _ in range(num_openings):
            old, self.token = self.token, self.ledger.open("successor")
            self.check_fenced(old)
        if self.state.steps_trained and data.draw(st.sampled_from([False, False, True])):
            return
        self.resume(data)

    def resume(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from([*self.kept, *([0] if self.state.floor_step == 0 else [])]))
        replayed = self.ledger.tickets_from(step)
        num_lost = data.draw(st.sampled_from([0, 0, 0, 1, len(replayed)]))
        missing = [ticket.id for ticket in replayed[:num_lost]]
        is_fork = step < self.model.branched_at
        self.ledger.resume(self.token, step, missing, is_fork=is_fork)
        self.go_back(step, is_exact=not missing)
        if is_fork:
            self.model.begin_branch(step)
        self.register(step)

    def go_back(self, step: int, is_exact: bool) -> None:
        self.model.go_back(step, is_exact)
        self.kept = [kept for kept in self.kept if kept <= step]
        self.complete = None

    def check_fenced(self, old: int) -> None:
        step, ledger = self.state.steps_trained, self.ledger
        for call in (
            lambda: ledger.register_version(old, step),
            lambda: ledger.reserve(old, step, self.now),
            lambda: ledger.trained(old, step),
            lambda: ledger.checkpointed(old, step, "digest", [step]),
            lambda: ledger.resume(old, step),
            lambda: ledger.request_evaluation(old, step),
        ):
            self.refused(FencedError, call)

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """The guard goes back: with another learning rate, or without some groups of the batch at hand."""
        choices = [*self.kept, *([0] if self.state.floor_step == 0 else [])]
        batch = self.reserve() if self.state.is_resumed and choices else None
        if batch is None:
            return
        failed, step = self.state.steps_trained, data.draw(st.sampled_from(choices))
        refused = [ticket.id for ticket in batch][: data.draw(st.sampled_from([0, 1, 3]))]
        is_fork = not refused or step < self.model.branched_at
        note = {"num_rollbacks": float(failed)}
        for _ in range(2):  # the answer to the first call may be lost
            self.ledger.resume(self.token, step, is_fork=is_fork, note=note, refused=refused)
        assert self.state.note == note
        if failed in self.model.replayed and refused:
            self.model.replayed = {}
        self.go_back(step, is_exact=True)
        if is_fork:
            self.model.begin_branch(step)
            for number in range(1, self.version + 1):
                assert self.state.versions.counted_step(number) <= step, "no step beyond the fork is shared"
        self.register(step)

    # The service

    @rule()
    def snapshot(self) -> None:
        self.shadow.take_snapshot(self.ledger)

    @rule(data=st.data(), num_snapshots=st.integers(0, 3))
    def restart(self, data: st.DataObject, num_snapshots: int) -> None:
        """The service comes back and finds a payload missing."""
        self.now += 100.0
        self.shadow.follow(self.ledger)
        self.ledger = self.shadow.recover(num_snapshots)
        self.complete = None
        tickets = list(self.state.tickets.values())
        waiting = [one for one in tickets if one.state in (State.STORED, State.RESERVED)]
        lost = data.draw(st.sampled_from([None, None, *waiting]))
        if lost is not None:
            if lost.state is State.RESERVED:
                self.model.replayed = {}
            self.ledger.lose_payload(lost.id)
        partial = data.draw(st.sampled_from([None, None, *[one for one in tickets if one.partial_attempt]]))
        if partial is not None and partial.partial_attempt:
            self.ledger.lose_partial(partial.id)
        self.ledger.restart(self.now)

    # Promises

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "ledger"):
            return
        check_indexes(self.ledger)
        num_events = len(self.shadow.events)
        self.shadow.follow(self.ledger)
        assert self.shadow.state.as_values() == self.state.as_values(), "the events say it all"
        done.update(commands=1, events=len(self.shadow.events) - num_events)
        again = LedgerState.from_snapshot(self.settings, self.state.as_snapshot())
        assert again.as_values() == self.state.as_values(), "a snapshot is exact"

    @invariant()
    def no_group_is_trained_twice_in_a_lineage(self) -> None:
        if hasattr(self, "ledger"):
            trained = [ticket for tickets in self.model.booked for ticket in tickets]
            assert len(trained) == len(set(trained))
            assert len(trained) == take_census(self.state).trained

    @invariant()
    def no_version_counts_as_younger_than_it_is(self) -> None:
        if hasattr(self, "ledger"):
            for number in range(max(1, self.version - 8), self.version + 1):
                counted, true = self.state.versions.counted_step(number), self.model.true_step(number)
                assert counted <= true, (number, self.model.histories[number], self.model.trunk)

    @invariant()
    def the_next_step_can_always_be_trained(self) -> None:
        """Liveness: with a willing replica and learner the next step comes, whatever happened before."""
        if hasattr(self, "ledger"):
            done["rounds"] = max(done["rounds"], drive_to_next_step(self.ledger, self.token, self.now))

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            replayed = Ledger.replay(self.settings, self.shadow.events)
            assert replayed.state.as_values() == self.state.as_values()


def run_machine(num_examples: int, num_steps: int) -> None:
    """Run examples and print how much was done."""
    done.clear()
    wanted = settings(
        max_examples=num_examples,
        stateful_step_count=num_steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(LedgerMachine, settings=wanted)
    print(
        f"{done['commands']} commands, {done['events']} transitions, "
        f"at most {done['rounds']} rounds to the next step"
    )


def test_the_ledger_keeps_its_promises() -> None:
    run_machine(num_examples=60, num_steps=50)
    assert done["events"] > 1000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_ledger_keeps_its_promises_over_a_hundred_thousand_transitions() -> None:
    run_machine(num_examples=2000, num_steps=100)
    assert done["events"] >= 100_000
