"""States of members, hellos of the right and of the wrong processes, pins and leavers."""

from __future__ import annotations

import itertools

import pytest

from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.protocol.world import TIMING, World, receiver_hello
from weight_sync.protocol.members import ALLOWED, Member, MemberState, PublisherInfo
from weight_sync.protocol.protocol import PUBLISHER, Coordination

WAYS = {
    "STARTING": "SYNCING DRAINING RETIRED DEAD",
    "SYNCING": "READY SUSPECT DRAINING RETIRED DEAD",
    "READY": "SYNCING SUSPECT PINNED DRAINING RETIRED DEAD",
    "SUSPECT": "SYNCING READY DRAINING RETIRED DEAD",
    "PINNED": "READY SYNCING SUSPECT DRAINING RETIRED DEAD",
    "DRAINING": "RETIRED DEAD",
    "RETIRED": "",
    "DEAD": "SYNCING",
}
FORBIDDEN = [
    pytest.param(start, end, id=f"a {start} member never becomes {end}")
    for start, end in itertools.permutations(MemberState, 2)
    if end.value not in WAYS[start.value].split()
]


def member_in(state: MemberState) -> Member:
    return Member("a", "1", 0.0, state=state)


@pytest.mark.parametrize(("start", "end"), FORBIDDEN)
def test_a_forbidden_move_is_refused(start, end):
    member = member_in(start)
    with pytest.raises(AssertionError, match=f"no way from {start} to {end}"):
        member.move(end)
    assert member.state is start


def test_every_other_move_is_allowed_and_the_table_says_no_more():
    for start, ends in WAYS.items():
        for end in ends.split():
            member_in(MemberState(start)).move(MemberState(end))
    assert {start.value: {end.value for end in ends} for start, ends in ALLOWED.items()} == {
        start: set(ends.split()) for start, ends in WAYS.items()
    }
    assert len(FORBIDDEN) == len(MemberState) * (len(MemberState) - 1) - sum(len(e) for e in ALLOWED.values())


def test_a_member_starts_until_a_replica_asks_for_weights_and_is_staged_meanwhile():
    world = World()
    world.coordination.hello(receiver_hello("a", "1"), world.now)
    world.publish(1)
    world.obey("a")
    assert world.states() == {"a": "STARTING"} and world.member("a").staged == 1
    world.coordination.attended("a", world.now)
    assert world.states() == {"a": "SYNCING"}
    world.obey("a")
    assert world.states() == {"a": "READY"}


def test_who_is_back_from_the_dead_is_not_believed_before_its_replica_has_spoken():
    world = World("a")
    world.publish(1)
    world.obey("a")
    world.pass_time(TIMING.dead_s)
    world.coordination.hello(receiver_hello("a", "1", serving=1, attended=True), world.now)
    assert world.states() == {"a": "SYNCING"} and not world.member("a").is_attended
    world.pass_time(1.0, "a")
    assert world.states() == {"a": "SYNCING"}
    world.obey("a")
    assert world.orders("withdraw", "a")  # so that its replica speaks
    world.coordination.attended("a", world.now)
    assert world.states() == {"a": "READY"}


def test_who_is_back_from_the_dead_is_asked_again_if_it_connects_again_before_it_was_heard():
    world = World("a")
    world.publish(1)
    world.obey("a")
    world.pass_time(TIMING.dead_s + 1.0)
    info = receiver_hello("a", "1", serving=1, attended=True)
    for _ in range(2):
        world.take()
        world.coordination.hello(info, world.now)
        assert [order.kind for order in world.take()] == ["withdraw"]
    world.coordination.attended("a", world.now)
    world.coordination.hello(info, world.now)
    assert world.states() == {"a": "READY"} and not world.take()


def test_a_process_that_has_retired_does_not_come_back_but_a_new_one_does():
    world = World("a")
    world.coordination.retire("a", world.now)
    assert not world.coordination.hello(receiver_hello("a", "1"), world.now)
    assert world.states() == {"a": "RETIRED"}
    assert world.coordination.hello(receiver_hello("a", "2"), world.now)
    assert world.states() == {"a": "STARTING"}


def test_an_older_process_is_refused_while_a_newer_one_lives_under_its_name():
    world = World()
    assert world.coordination.hello(receiver_hello("a", "new", started_ms=2), world.now)
    assert not world.coordination.hello(receiver_hello("a", "old", started_ms=1), world.now)
    assert world.member("a").incarnation == "new" and world.coordination.counters["refused_hellos"] == 1
    world.pass_time(TIMING.silence_s)
    assert world.coordination.hello(receiver_hello("a", "old", started_ms=1), world.now)


def publisher_seat(world: World, incarnation: str, started_ms: int) -> PublisherInfo:
    return PublisherInfo(incarnation, "127.0.0.1", 1, world.now, started_ms=started_ms)


def test_a_thawed_publisher_does_not_take_the_seat_of_its_successor():
    world = World("a")
    assert world.coordination.publisher_hello(publisher_seat(world, "new", 2), PolicyVersion(3, 2), world.now)
    old = publisher_seat(world, "old", 1)
    assert not world.coordination.publisher_hello(old, PolicyVersion(2, 1), world.now)
    assert not world.coordination.seen(PUBLISHER, "old", world.now)
    world.obey("a")
    assert world.member("a").serving == 3


def test_a_version_older_than_any_that_was_published_is_never_offered():
    world = World("a")
    world.publish(3)
    world.obey("a")
    publisher = publisher_seat(world, "q", 9)
    assert world.coordination.publisher_hello(publisher, PolicyVersion(2, 1), world.now)
    world.join("b")
    world.obey("a", "b")
    assert world.coordination.current is None and not world.orders("offer", "b")
    assert world.coordination.counters["old_versions"] == 1


def test_a_new_coordinator_learns_from_a_hello_that_a_member_is_leaving():
    world = World("b")
    world.coordination.hello(receiver_hello("a", "1", attended=True, draining=True), world.now)
    world.publish(1)
    world.obey("a", "b")
    assert world.states() == {"a": "DRAINING", "b": "READY"} and not world.orders("offer", "a")


def in_transfer(world: World) -> int:
    """Version 1 is in transfer to a and b; return the round's id."""
    world.publish(1)
    (round_,) = world.coordination.rounds
    for name in ("a", "b"):
        world.coordination.accepted(name, round_.id, world.now)
    world.take()
    return round_.id


@pytest.mark.parametrize("what", ["pin", "drain"])
def test_who_is_no_longer_wanted_in_the_middle_of_a_transfer_does_not_break_it_for_the_others(what):
    world = World("a", "b")
    round_id = in_transfer(world)
    getattr(world.coordination, what)("b", world.now)
    assert not world.orders("abort")
    for name in ("a", "b"):
        world.coordination.verified(name, round_id, 1, world.now)
    world.coordination.sent(round_id, 1, world.now)
    world.obey("a", "b")
    assert world.member("a").serving == 1 and not world.orders("commit", "b")
    assert not world.coordination.counters["rounds_failed"]


def test_who_goes_in_the_middle_of_a_transfer_costs_the_others_a_retry_and_nobody_is_blamed():
    world = World("a", "b")
    round_id = in_transfer(world)
    world.coordination.retire("b", world.now)
    world.coordination.failed("a", round_id, "aborted", world.now)
    world.obey("a")
    assert world.member("a").serving == 1 and not world.coordination.culprit
    assert not world.member("a").is_lone


@pytest.mark.parametrize("what", ["pin", "drain", "retire"])
def test_who_leaves_before_the_transfer_is_not_blamed(what):
    world = World("a")
    world.publish(1)
    world.take()
    getattr(world.coordination, what)("a", world.now)
    world.pass_time(TIMING.deadline_s, "a")
    assert not world.coordination.rounds and not world.coordination.culprit
    assert not world.member("a").is_fenced


def test_a_pinned_member_is_pinned_again_after_it_was_suspected():
    world = World("a")
    world.publish(1)
    world.obey("a")
    world.coordination.pin("a", world.now)
    assert world.states() == {"a": "PINNED"}
    world.pass_time(TIMING.silence_s)
    assert world.states() == {"a": "SUSPECT"}
    world.coordination.seen("a", "1", world.now)
    assert world.states() == {"a": "PINNED"}
    world.coordination.unpin("a", world.now)
    assert world.states() == {"a": "READY"}


def test_a_load_that_is_reported_late_does_not_take_a_member_back():
    world = World("a")
    for number in (1, 2):
        world.publish(number)
        world.obey("a")
    world.coordination.loaded("a", 1, True, "", world.now)
    assert world.member("a").serving == 2


def test_a_fence_stays_with_the_replica_when_its_receiver_is_started_anew():
    world = World("a")
    world.publish(1)
    world.obey("a")
    world.publish(2)
    world.pass_time(TIMING.offer_s + 0.5, "a")
    assert world.member("a").is_fenced
    world.join("a", incarnation="2", serving=1)
    assert world.member("a").is_fenced
    world.obey("a")
    assert world.member("a").serving == 2 and not world.member("a").is_fenced


def test_a_fence_outlives_the_coordinator_that_set_it():
    world = World("a", "b")
    world.publish(1)
    world.obey("a", "b")
    world.publish(2)
    world.pass_time(TIMING.offer_s + 0.5, "a", "b")
    assert world.coordination.fences == {"a": 2, "b": 2}
    world.coordination = Coordination(TIMING, token=1, fences=world.coordination.fences)
    world.join("a", serving=1)
    assert world.states() == {"a": "SYNCING"} and world.coordination.fences == {"a": 2, "b": 2}
    world.coordination.loaded("a", 2, True, "", world.now)
    assert world.states() == {"a": "READY"} and world.coordination.fences == {"b": 2}


def test_who_verifies_after_its_round_has_ended_is_the_base_of_later_differences():
    world = World("a", uses_delta=True)
    world.publish(1)
    world.obey("a")
    world.publish(2)
    (offer,) = [order for order in world.take() if order.kind == "offer"]
    world.coordination.accepted("a", offer.fields["round"], world.now)
    world.take()
    world.pass_time(TIMING.deadline_s + 1.0, "a")
    world.coordination.verified("a", offer.fields["round"], 2, world.now)
    assert world.member("a").base == 2


def test_a_member_that_was_silent_while_a_version_came_gets_it_when_it_polls_again() -> None:
    world = World("a", "b")
    world.publish(1)
    world.obey("a", "b")
    world.pass_time(4.0, "b")
    assert world.states() == {"a": "SUSPECT", "b": "READY"}
    world.publish(2)
    world.obey("b")
    assert (world.member("a").serving, world.member("b").serving) == (1, 2)
    world.pass_time(0.5, "a", "b")
    world.obey("a", "b")
    assert world.member("a").serving == 2


def test_a_member_that_was_silent_at_its_turn_to_load_takes_it_when_it_polls_again() -> None:
    world = World("a", "b")
    world.publish(1)
    world.obey("a", "b", loads=False)
    (first,) = (order.to for order in world.orders("commit"))
    second = "b" if first == "a" else "a"
    world.pass_time(4.0, first)
    assert world.states()[second] == "SUSPECT" and world.member(second).staged == 1
    world.coordination.loaded(first, 1, True, "", world.now)
    assert world.take() == [], "it cannot be told to"
    world.pass_time(0.5, "a", "b")
    world.obey("a", "b")
    assert world.member(second).serving == 1


def test_an_offer_that_ended_with_its_publisher_is_made_again_though_the_members_say_nothing() -> None:
    world = World("a", "b")
    world.pass_time(2.0, "a", "b", is_publisher_alive=False)
    world.publish(1)
    offer = next(order for order in world.take() if order.to == "a")
    world.obey_order(offer, loads=True)
    world.pass_time(1.5, "a", "b", is_publisher_alive=False)
    assert world.coordination.culprit == "publisher: silent" and world.coordination.round is None
    world.take()
    world.pass_time(0.5, "a", "b")
    assert {order.to for order in world.take() if order.kind == "offer"} == {"a", "b"}


@pytest.mark.parametrize("event", ["retire", "drain", "hello", "another process"])
def test_who_was_told_to_load_and_goes_or_begins_anew_leaves_its_turn_to_the_next(event: str) -> None:
    world = World("a", "b")
    world.publish(1)
    world.obey("a", "b", loads=False)
    (first,) = (order.to for order in world.orders("commit"))
    second = "b" if first == "a" else "a"
    if event in ("retire", "drain"):
        getattr(world.coordination, event)(first, world.now)
        world.pass_time(TIMING.deadline_s, first, second) if event == "drain" else None
    else:
        world.join(first, incarnation="1" if event == "hello" else "2")
    assert [order.to for order in world.take() if order.kind == "commit"] == [second]


def test_a_swap_has_its_time_anew_after_a_pause_of_the_coordinator_and_no_more() -> None:
    world = World("a")
    world.publish(1)
    world.obey("a", loads=False)
    world.now += 3 * TIMING.deadline_s  # it did not run
    world.pass_time(TIMING.deadline_s - 1.0, "a")
    assert world.coordination.counters["pauses"] == 1
    assert world.coordination.counters["missed_swaps"] == 0
    world.pass_time(2.0, "a")
    assert world.coordination.counters["missed_swaps"] == 1


def test_a_member_is_only_itself_so_that_a_thousand_are_told_apart_without_reading_their_fields():
    assert Member("a", "1", 0.0) != Member("a", "1", 0.0)
