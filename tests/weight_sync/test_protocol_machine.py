"""The protocol as a hypothesis state machine: peers that answer late, twice, wrongly or not at all."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncrl.versions import PolicyVersion
from tests.weight_sync.world import GLOO, World
from weight_sync.protocol.members import Card, MemberState, PublisherSeat
from weight_sync.protocol.protocol import PUBLISHER
from weight_sync.protocol.rounds import Order

NAMES = st.sampled_from(["a", "b", "c"])
CAUSES = st.sampled_from(["transport", "digest", "aborted", "refused: full"])


class ProtocolMachine(RuleBasedStateMachine):
    """Peers that answer late, twice, wrongly or not at all; at the end they behave, and all catch up."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(parallelism=2)
        self.world.after_step = self.collect
        self.coordination = self.world.coordination
        self.inbox: list[Order] = []
        self.old: list[Order] = []
        self.groups: dict[int, tuple[str, ...]] = {}
        self.last_states: dict[tuple[str, str], MemberState] = {}
        self.number = 0
        self.incarnation = 0

    def collect(self) -> None:
        """Take orders and check what must hold for each."""
        orders = self.world.take()
        for order in orders:
            if order.kind == "offer":
                member = self.world.member(order.to)
                assert self.coordination.current is not None
                assert order.fields["number"] == self.coordination.current.number == self.number
                assert not member.is_pinned and member.state in (MemberState.SYNCING, MemberState.READY)
        rounds: dict[int, list[str]] = {}
        for order in orders:
            if order.kind == "transfer" and order.to != PUBLISHER:
                rounds.setdefault(order.fields["membership"], []).append(order.to)
        for membership, names in rounds.items():
            key = tuple(f"{name}#{self.world.member(name).incarnation}" for name in names)
            assert self.groups.setdefault(membership, key) == key
        self.inbox += orders

    @rule(name=NAMES, again=st.booleans(), serving=st.booleans())
    def hello(self, name, again, serving):
        known = self.coordination.members.get(name)
        self.incarnation += 1
        if known is not None and again and known.state is not MemberState.RETIRED:
            incarnation, number = known.incarnation, known.serving
        else:
            incarnation, number = f"{name}{self.incarnation}", self.number if serving else 0
        self.coordination.hello(Card(name, incarnation, GLOO, number), self.world.now)
        self.collect()

    @rule()
    def publish(self):
        self.number += 1
        self.coordination.published(PolicyVersion(self.number, self.number), self.world.now)
        self.collect()

    @precondition(lambda self: self.inbox)
    @rule(data=st.data(), keep=st.booleans())
    def obey(self, data, keep):
        order = self.inbox.pop(data.draw(st.integers(0, len(self.inbox) - 1)))
        if keep:
            self.old.append(order)
        self.answer(order)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def answer_again(self, data):
        self.answer(data.draw(st.sampled_from(self.old)))

    def answer(self, order: Order) -> None:
        if order.to == PUBLISHER:
            if order.kind == "transfer":
                self.coordination.sent(order.fields["round"], 1, self.world.now)
        elif self.world.member(order.to).is_listening:
            self.world.obey_order(order, loads=True)
        self.collect()

    @precondition(lambda self: self.inbox)
    @rule(data=st.data(), cause=CAUSES)
    def fail(self, data, cause):
        order = self.inbox.pop(data.draw(st.integers(0, len(self.inbox) - 1)))
        if order.to == PUBLISHER:
            self.coordination.send_failed(order.fields.get("round", 0), cause, self.world.now)
        elif order.kind == "commit" and self.world.member(order.to).is_listening:
            self.coordination.loaded(order.to, order.fields["number"], False, "broken", self.world.now)
        elif "round" in order.fields:
            self.coordination.failed(order.to, order.fields["round"], cause, self.world.now)
        self.collect()

    @precondition(lambda self: self.inbox)
    @rule(data=st.data())
    def lose(self, data):
        self.inbox.pop(data.draw(st.integers(0, len(self.inbox) - 1)))

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 40.0]), alive=st.sets(NAMES))
    def pass_time(self, seconds, alive):
        self.world.pass_time(seconds, *(name for name in alive if name in self.coordination.members))
        self.collect()

    @rule(name=NAMES, what=st.sampled_from(["attended", "pin", "unpin", "drain", "retire"]))
    def tell(self, name, what):
        if name in self.coordination.members and self.world.member(name).is_listening:
            getattr(self.coordination, what)(name, self.world.now)
            self.collect()

    @rule()
    def replace_publisher(self):
        self.incarnation += 1
        current = PolicyVersion(self.number, self.number) if self.number else None
        self.world.publisher = f"p{self.incarnation}"
        seat = PublisherSeat(self.world.publisher, GLOO, "127.0.0.1", 1, self.world.now)
        self.coordination.publisher_hello(seat, current, self.world.now)
        self.collect()

    @invariant()
    def no_more_swap_than_allowed(self):
        assert sum(member.swapping is not None for member in self.coordination.members.values()) <= 2

    @invariant()
    def states_move_along_the_table(self):
        for member in self.coordination.members.values():
            before = self.last_states.get((member.name, member.incarnation), member.state)
            if before is MemberState.DEAD:
                assert member.state in (MemberState.DEAD, MemberState.SYNCING, MemberState.READY)
            self.last_states[member.name, member.incarnation] = member.state

    @invariant()
    def a_ready_member_serves_something_and_is_not_fenced(self):
        for member in self.coordination.members.values():
            if member.state is MemberState.READY:
                assert member.serving and not member.is_fenced

    @invariant()
    def a_member_holds_two_copies_at_most(self):
        for member in self.coordination.members.values():
            assert sum(n is not None for n in (member.staging, member.staged, member.swapping)) <= 2

    def teardown(self) -> None:
        """From now on everyone behaves: then every member that may follow ends at the newest version."""
        self.world.after_step = lambda: None
        for member in list(self.coordination.members.values()):
            if member.state is MemberState.DEAD:
                self.coordination.hello(Card(member.name, member.incarnation, GLOO), self.world.now)
        self.number += 1
        self.world.publish(self.number)
        following = [m for m in self.coordination.members.values() if m.is_listening]
        for member in following:
            self.coordination.unpin(member.name, self.world.now)
        for _ in range(40):
            for member in following:
                self.coordination.attended(member.name, self.world.now)
            self.world.obey(*(member.name for member in following))
            self.world.pass_time(1.0, *(member.name for member in following))
        for member in following:
            if member.state is not MemberState.DRAINING:
                assert member.state is MemberState.READY and member.serving == self.number, member
                assert not member.is_fenced


ProtocolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestProtocolMachine = ProtocolMachine.TestCase


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_protocol_keeps_its_promises_over_many_rounds() -> None:
    run_state_machine_as_test(
        ProtocolMachine,
        settings=settings(
            max_examples=1000,
            stateful_step_count=60,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
