"""The protocol as a state machine, driven by hand and by hypothesis. No processes, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.versions import PolicyVersion
from weight_sync.members import ALLOWED, Card, Member, MemberState, PublisherSeat
from weight_sync.protocol import PUBLISHER, Coordination
from weight_sync.rounds import Order, Timing

TIMING = Timing(deadline_s=10.0, offer_s=2.0, settle_s=1.0, silence_s=3.0, dead_s=30.0)
GLOO = frozenset({"gloo"})


class World:
    """A coordination with a clock and with peers that answer as they are told to."""

    def __init__(self, *names: str, parallelism: int = 1) -> None:
        self.now = 100.0
        self.coordination = Coordination(TIMING, parallelism)
        self.sent: list[Order] = []
        self.publisher = "p"
        self.after_step: Callable[[], None] = lambda: None
        self.coordination.publisher_hello(PublisherSeat("p", GLOO, "127.0.0.1", 1, self.now), None, self.now)
        for name in names:
            self.join(name)

    def join(self, name: str, incarnation: str = "1", serving: int = 0, **kwargs: Any) -> None:
        self.coordination.hello(Card(name, incarnation, GLOO, serving, **kwargs), self.now)
        self.coordination.attended(name, self.now)

    def publish(self, number: int) -> None:
        self.coordination.published(PolicyVersion(number, number - 1), self.now)

    def take(self) -> list[Order]:
        orders = self.coordination.take_orders()
        self.sent += orders
        return orders

    def obey(self, *names: str, loads: bool = True) -> None:
        """Let `names` and the publisher do all that they are told to."""
        while orders := self.take():
            for order in orders:
                if order.to == PUBLISHER and order.kind == "transfer":
                    self.coordination.sent(order.fields["round"], 1, self.now)
                elif order.to in names:
                    self._obey(order, loads)

    def _obey(self, order: Order, loads: bool) -> None:
        name, fields, coordination = order.to, order.fields, self.coordination
        if order.kind == "offer":
            coordination.accepted(name, fields["round"], self.now)
        elif order.kind == "transfer":
            coordination.verified(name, fields["round"], fields["number"], self.now)
        elif order.kind == "commit" and loads:
            coordination.loaded(name, fields["number"], True, "", self.now)

    def pass_time(self, seconds: float, *alive: str) -> None:
        """Let time pass in small steps while `alive` and the publisher keep polling."""
        for _ in range(int(seconds / 0.25)):
            self.now += 0.25
            self.coordination.seen(PUBLISHER, self.publisher, self.now)
            for name in alive:
                self.coordination.seen(name, self.member(name).incarnation, self.now)
            self.coordination.tick(self.now)
            self.after_step()

    def member(self, name: str) -> Member:
        return self.coordination.members[name]

    def states(self) -> dict[str, str]:
        return {member.name: member.state.value for member in self.coordination.members.values()}

    def orders(self, kind: str, to: str | None = None) -> list[Order]:
        return [order for order in self.sent if order.kind == kind and to in (None, order.to)]


def test_a_version_reaches_all_members_and_they_are_ready():
    world = World("a", "b")
    assert world.states() == {"a": "SYNCING", "b": "SYNCING"}
    world.publish(1)
    world.obey("a", "b")
    assert world.states() == {"a": "READY", "b": "READY"}
    assert world.coordination.counters["rounds"] == 1 and not world.coordination.counters["rounds_failed"]


def test_the_newest_version_wins_and_unsent_older_ones_are_skipped():
    world = World("a")
    world.publish(1)
    world.publish(2)
    world.publish(3)
    world.obey("a")
    assert [order.fields["number"] for order in world.orders("offer")] == [1, 3]
    assert world.coordination.counters["versions_skipped"] == 1
    assert world.member("a").serving == 3


def test_a_version_that_does_not_rise_is_ignored():
    world = World("a")
    world.publish(2)
    world.publish(1)
    world.obey("a")
    assert world.member("a").serving == 2
    assert world.coordination.current == PolicyVersion(2, 1)
    assert world.coordination.counters["versions_published"] == 1


def test_a_group_is_cached_and_a_new_process_makes_a_new_one():
    world = World("a", "b")
    for number in (1, 2):
        world.publish(number)
        world.obey("a", "b")
    world.join("b", incarnation="2")
    world.obey("a", "b")
    world.publish(3)
    world.obey("a", "b")
    memberships = [order.fields["membership"] for order in world.orders("transfer", PUBLISHER)]
    assert memberships[0] == memberships[1] and len(set(memberships)) == 3
    assert memberships[0] not in world.orders("transfer", PUBLISHER)[-1].fields["live"]


def test_a_late_joiner_gets_its_own_round():
    world = World("a")
    world.publish(1)
    world.obey("a")
    world.join("b")
    world.obey("a", "b")
    assert [order.to for order in world.orders("offer")] == ["a", "b"]
    assert world.states() == {"a": "READY", "b": "READY"}


def test_who_does_not_answer_an_offer_is_left_out_and_fenced_and_the_others_go_on():
    world = World("a", "b")
    world.publish(1)
    world.obey("a")
    world.pass_time(TIMING.offer_s, "a", "b")
    world.obey("a")
    assert world.member("a").serving == 1
    assert world.coordination.culprit.startswith("b:") and world.member("b").is_fenced
    assert world.orders("transfer", "a")[0].fields["world"] == 2


def break_group(world: World) -> None:
    """Version 1 is in transfer to a and b; b dies in the middle, a's group breaks."""
    world.publish(1)
    for name in ("a", "b"):
        world.coordination.accepted(name, 1, world.now)
    world.take()
    world.coordination.failed("a", 1, "transport", world.now)
    world.coordination.send_failed(1, "transport", world.now)


def test_a_member_that_dies_in_a_transfer_is_the_culprit_and_the_others_are_retried_without_it():
    world = World("a", "b")
    break_group(world)
    world.pass_time(TIMING.settle_s, "a")
    world.obey("a")
    assert world.coordination.culprit.startswith("b:")
    assert world.states()["b"] == "SUSPECT" and world.states()["a"] == "READY"
    assert not world.member("a").is_fenced
    assert [order.fields["world"] for order in world.orders("transfer", PUBLISHER)] == [3, 2]


def test_a_break_without_a_culprit_is_tried_again_one_by_one():
    world = World("a", "b")
    break_group(world)
    world.coordination.failed("b", 1, "transport", world.now)
    world.obey("a", "b")
    assert [order.fields["world"] for order in world.orders("transfer", PUBLISHER)] == [3, 2, 2]
    assert world.states() == {"a": "READY", "b": "READY"}


def test_a_member_that_fails_alone_is_blamed_and_tried_again_later():
    world = World("a")
    world.publish(1)
    world.coordination.accepted("a", 1, world.now)
    world.coordination.failed("a", 1, "transport", world.now)
    assert world.coordination.culprit.startswith("a:") and world.member("a").is_fenced
    world.coordination.seen("a", "1", world.now)
    world.coordination.tick(world.now)
    world.take()
    assert len(world.orders("offer")) == 1
    world.pass_time(1.0, "a")
    world.obey("a")
    assert world.states() == {"a": "READY"} and not world.member("a").is_fenced
    first, second = (order.fields["membership"] for order in world.orders("transfer", "a"))
    assert first != second


def test_a_member_that_speaks_but_never_ends_its_transfer_is_left_out_after_the_deadline():
    world = World("a", "b")
    world.publish(1)
    for name in ("a", "b"):
        world.coordination.accepted(name, 1, world.now)
    world.coordination.sent(1, 1, world.now)
    world.coordination.verified("a", 1, 1, world.now)
    world.pass_time(TIMING.deadline_s - 0.5, "a", "b")
    assert world.coordination.round is not None and not world.coordination.culprit
    world.pass_time(TIMING.settle_s + 1.0, "a", "b")
    assert world.coordination.culprit.startswith("b:") and world.member("b").is_fenced
    assert not world.member("a").is_fenced


def test_a_third_version_waits_until_a_staging_segment_is_free():
    world = World("a")
    for number in (1, 2, 3):
        world.publish(number)
        world.obey("a", loads=False)
    assert (world.member("a").swapping, world.member("a").staged) == (1, 2)
    assert [order.fields["number"] for order in world.orders("offer")] == [1, 2]
    world.coordination.loaded("a", 1, True, "", world.now)
    world.obey("a")
    assert world.member("a").serving == 3


def test_a_digest_that_differs_blames_its_member_and_spares_the_group():
    world = World("a", "b")
    world.publish(1)
    for name in ("a", "b"):
        world.coordination.accepted(name, 1, world.now)
    world.coordination.sent(1, 1, world.now)
    world.coordination.failed("b", 1, "digest", world.now)
    world.coordination.verified("a", 1, 1, world.now)
    world.take()
    assert world.coordination.culprit == "b: digest" and world.member("b").is_fenced
    assert not world.member("a").is_fenced and world.coordination.counters["rounds_failed/digest"] == 1


def test_a_verified_member_swaps_while_another_one_still_receives():
    world = World("a", "b")
    world.publish(1)
    for name in ("a", "b"):
        world.coordination.accepted(name, 1, world.now)
    world.coordination.verified("a", 1, 1, world.now)
    assert [order.to for order in world.take() if order.kind == "commit"] == ["a"]


@pytest.mark.parametrize("parallelism", [1, 2])
def test_no_more_than_parallelism_swap_at_once(parallelism):
    world = World("a", "b", "c", parallelism=parallelism)
    world.publish(1)
    world.obey("a", "b", "c", loads=False)
    assert len(world.orders("commit")) == parallelism
    world.coordination.loaded(world.orders("commit")[0].to, 1, True, "", world.now)
    world.take()
    assert len(world.orders("commit")) == parallelism + 1


def test_a_member_without_a_replica_holds_no_permit():
    world = World()
    world.coordination.hello(Card("a", "1", GLOO), world.now)
    world.join("b")
    world.publish(1)
    world.obey("a", "b")
    assert world.member("b").serving == 1 and world.member("a").staged == 1
    world.coordination.attended("a", world.now)
    world.obey("a", "b")
    assert world.member("a").serving == 1


def test_a_swap_that_is_late_frees_the_permit_and_fences_its_member_until_it_has_caught_up():
    world = World("a", "b")
    world.publish(1)
    world.obey("a", "b", loads=False)
    first = world.orders("commit")[0].to
    world.pass_time(TIMING.deadline_s, "a", "b")
    world.obey("b" if first == "a" else "a")
    assert world.member(first).is_fenced and world.orders("withdraw", first)
    assert world.member("b" if first == "a" else "a").serving == 1
    world.coordination.loaded(first, 1, True, "", world.now)
    assert not world.member(first).is_fenced and world.states()[first] == "READY"


def test_a_load_that_failed_is_syncing_and_loads_again():
    world = World("a")
    world.publish(1)
    world.obey("a", loads=False)
    world.coordination.loaded("a", 1, False, "half", world.now)
    assert world.states() == {"a": "SYNCING"} and world.member("a").serving == 0
    world.obey("a")
    assert world.states() == {"a": "READY"} and len(world.orders("commit")) == 2


def test_a_load_that_always_fails_is_blamed_and_does_not_spin():
    world = World("a")
    world.publish(1)
    world.obey("a", loads=False)
    while world.member("a").swapping is not None and len(world.orders("commit")) < 50:
        world.coordination.loaded("a", 1, False, "broken", world.now)
        world.obey("a", loads=False)
    assert world.coordination.culprit.startswith("a: load failed") and world.member("a").is_fenced
    assert world.coordination.counters["failed_loads"] == 3


def test_a_pinned_member_gets_no_offers_and_no_commits_until_it_is_unpinned():
    world = World("a")
    world.coordination.pin("a", world.now)
    world.publish(1)
    world.obey("a")
    assert not world.sent
    world.coordination.unpin("a", world.now)
    world.obey("a")
    assert world.member("a").serving == 1


def test_a_pin_takes_a_commit_back_that_was_not_taken_up():
    world = World("a", "b")
    world.publish(1)
    world.obey("a", "b", loads=False)
    first = world.orders("commit")[0].to
    world.coordination.pin(first, world.now)
    world.obey("a", "b")
    assert world.member(first).staged == 1 and world.member(first).swapping is None
    assert len(world.orders("commit")) == 2


def test_a_draining_member_gets_nothing_new_and_retires_for_good():
    world = World("a", "b")
    world.coordination.drain("a", world.now)
    world.publish(1)
    world.obey("a", "b")
    assert [order.to for order in world.orders("offer")] == ["b"]
    world.coordination.retire("a", world.now)
    assert not world.coordination.seen("a", "1", world.now)


def test_a_silent_member_is_suspect_then_dead_and_only_a_hello_brings_it_back():
    world = World("a")
    world.publish(1)
    world.obey("a")
    world.pass_time(TIMING.silence_s)
    assert world.states() == {"a": "SUSPECT"} and world.member("a").is_fenced
    world.pass_time(TIMING.dead_s)
    assert world.states() == {"a": "DEAD"} and not world.coordination.seen("a", "1", world.now)
    world.join("a")
    assert world.states() == {"a": "SYNCING"}
    world.obey("a")
    assert world.states() == {"a": "READY"}


def test_a_suspect_that_is_heard_again_and_is_current_is_ready():
    world = World("a")
    world.publish(1)
    world.obey("a")
    world.pass_time(TIMING.silence_s)
    world.coordination.seen("a", "1", world.now)
    assert world.states() == {"a": "READY"} and not world.member("a").is_fenced


def test_a_suspect_that_is_behind_stays_fenced_until_it_has_caught_up():
    world = World("a")
    world.publish(1)
    world.obey("a")
    world.now += TIMING.silence_s
    world.coordination.seen(PUBLISHER, "p", world.now)
    world.publish(2)
    world.coordination.tick(world.now)
    world.coordination.seen("a", "1", world.now)
    assert world.states() == {"a": "SYNCING"} and world.member("a").is_fenced
    world.pass_time(0.25, "a")
    world.obey("a")
    assert world.states() == {"a": "READY"} and not world.member("a").is_fenced


def test_a_replica_that_was_started_anew_is_synced_anew():
    world = World("a")
    world.publish(1)
    world.obey("a")
    world.coordination.restarted("a", 0, world.now)
    assert world.states() == {"a": "SYNCING"}
    world.obey("a")
    assert world.states() == {"a": "READY"} and len(world.orders("offer")) == 2


def test_a_superseded_version_blames_nobody():
    world = World("a")
    world.publish(1)
    world.coordination.accepted("a", 1, world.now)
    world.publish(2)
    world.coordination.send_failed(1, "superseded", world.now)
    world.coordination.failed("a", 1, "aborted", world.now)
    world.obey("a")
    assert world.member("a").serving == 2 and not world.coordination.culprit


def test_a_new_publisher_starts_without_versions_and_groups():
    world = World("a")
    world.publish(1)
    world.obey("a")
    seat = PublisherSeat("q", GLOO, "127.0.0.1", 2, world.now)
    world.coordination.publisher_hello(seat, None, world.now)
    assert world.coordination.current is None
    world.publish(2)
    world.obey("a")
    first, second = (order.fields["membership"] for order in world.orders("transfer", PUBLISHER))
    assert first != second and world.member("a").serving == 2


def test_a_lost_publisher_breaks_the_round_and_blames_no_member():
    world = World("a")
    world.publish(1)
    world.coordination.accepted("a", 1, world.now)
    world.now += TIMING.silence_s
    world.coordination.seen("a", "1", world.now)
    world.coordination.tick(world.now)
    world.coordination.failed("a", 1, "aborted", world.now)
    assert world.coordination.round is None and not world.coordination.culprit
    assert world.coordination.counters["rounds_failed/publisher_lost"] == 1


def test_nccl_is_used_only_if_every_member_can():
    both = frozenset({"gloo", "nccl"})
    for abilities, wanted in ((both, "nccl"), (GLOO, "gloo")):
        coordination = Coordination(TIMING, backend="nccl")
        coordination.publisher_hello(PublisherSeat("p", both, "127.0.0.1", 1, 0.0), PolicyVersion(1, 0), 0.0)
        coordination.hello(Card("a", "1", abilities), 0.0)
        coordination.accepted("a", 1, 0.0)
        assert [o.fields["backend"] for o in coordination.take_orders() if o.kind == "transfer"] == [
            wanted
        ] * 2


def test_there_is_no_way_from_dead_to_ready_but_syncing():
    assert ALLOWED[MemberState.DEAD] == {MemberState.SYNCING} and not ALLOWED[MemberState.RETIRED]
    member = Member("a", "1", GLOO, 0.0)
    member.move(MemberState.DEAD)
    with pytest.raises(AssertionError, match="no way from DEAD to READY"):
        member.move(MemberState.READY)


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
            self.world._obey(order, loads=True)
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
