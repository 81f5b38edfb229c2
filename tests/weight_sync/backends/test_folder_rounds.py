"""Members that read the folder: each in a round of its own, told to read when all is stored."""

from __future__ import annotations

import pytest

from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.protocol.world import TIMING, World
from weight_sync.protocol.members import PublisherInfo
from weight_sync.protocol.protocol import PUBLISHER
from weight_sync.protocol.rounds import FOLDER_BYTES_PER_S, MAX_CACHED_GROUPS, NEVER, Lane

READERS = ("receiver.1", "receiver.2")
FULL = "store: file:///shared: OSError (No space left on device)"


@pytest.fixture
def world() -> World:
    """A member of a group, and two readers."""
    made = World("receiver.0", parallelism=4)
    info = PublisherInfo("p", "127.0.0.1", 1, made.now, folder="run/p")
    made.coordination.publisher_hello(info, None, made.now)
    for name in READERS:
        made.join(name, by_folder=True)
    return made


def accept(world: World, *names: str) -> dict[str, int]:
    """Have members accept what they are offered; return their rounds."""
    offers = {order.to: order.fields["round"] for order in world.take() if order.kind == "offer"}
    for name in names:
        world.coordination.accepted(name, offers[name], world.now)
    return offers


def test_a_reader_is_told_to_read_when_all_is_stored_at_the_place_of_the_version(world: World) -> None:
    world.publish(3)
    rounds = accept(world, *READERS)
    assert len(set(rounds.values())) == 3
    told = {order.fields["round"]: order for order in world.take()}
    assert {order.to for order in told.values()} == {PUBLISHER}
    world.coordination.sent(rounds["receiver.1"], 1, world.now)
    (order,) = world.take()
    assert (order.to, order.kind, order.fields["folder"]) == ("receiver.1", "transfer", "run/p/3")
    assert (order.fields["rank"], order.fields["world"]) == (1, 2)
    world.coordination.sent(rounds["receiver.1"], 1, world.now)
    assert not world.take()


def test_a_slow_reader_holds_up_nobody_and_has_the_time_that_a_far_folder_takes(world: World) -> None:
    names = ("receiver.0", "receiver.1")
    num_bytes = int(30 * FOLDER_BYTES_PER_S)
    for number in (1, 2, 3):
        world.coordination.published(PolicyVersion(number, number - 1), world.now, num_bytes)
        world.obey(*names)
        slow = world.orders("offer", "receiver.2")
        if number == 1:
            world.coordination.accepted("receiver.2", slow[0].fields["round"], world.now)
            world.obey(*names)
        assert [world.member(name).serving for name in names] == [number] * 2
        world.pass_time(5.0, "receiver.0", *READERS)
    assert [round_.lane for round_ in world.coordination.rounds] == [Lane.FOLDER]
    world.coordination.verified("receiver.2", slow[0].fields["round"], 1, world.now)
    world.obey("receiver.0", *READERS)
    assert world.member("receiver.2").serving == 3
    assert not world.coordination.culprit


def test_a_store_that_takes_nothing_is_the_publishers_and_is_tried_again_later(world: World) -> None:
    world.publish(1)
    rounds = accept(world, *READERS)
    world.take()
    for name in READERS:
        world.coordination.send_failed(rounds[name], FULL, world.now)
        world.coordination.failed(name, rounds[name], "aborted", world.now)
    world.take()
    assert world.coordination.culprit == f"{PUBLISHER}: {FULL}"
    member = world.member("receiver.1")
    assert not member.is_fenced and member.last_error == FULL
    assert member.retry_at > world.now and not [
        one for one in world.coordination.rounds if one.lane is Lane.FOLDER
    ]
    world.pass_time(1.0, "receiver.0", *READERS)
    accept(world, *READERS)
    assert all(order.fields["afresh"] for order in world.take())


def test_what_a_reader_cannot_read_is_its_own_failure_in_its_own_words(world: World) -> None:
    world.publish(1)
    rounds = accept(world, *READERS)
    world.coordination.sent(rounds["receiver.1"], 1, world.now)
    world.coordination.failed("receiver.1", rounds["receiver.1"], "store: PermissionError", world.now)
    world.take()
    assert world.coordination.culprit == "receiver.1: store: PermissionError"
    assert world.member("receiver.1").is_fenced and not world.member("receiver.2").is_fenced


def test_a_publisher_that_does_not_store_all_in_time_is_blamed_and_no_reader(world: World) -> None:
    world.publish(1)
    accept(world, *READERS)
    world.pass_time(TIMING.deadline_s, "receiver.0", *READERS)
    assert world.coordination.culprit.startswith(f"{PUBLISHER}: store: the publisher had not stored")
    assert not any(world.member(name).is_fenced for name in READERS)


def test_a_reader_that_dies_before_it_was_told_to_read_ends_its_round(world: World) -> None:
    world.publish(1)
    accept(world, *READERS)
    world.pass_time(TIMING.silence_s + 1.0, "receiver.0", "receiver.2")
    left = {name for round_ in world.coordination.rounds for name in round_.parts}
    assert left == {"receiver.0", "receiver.2"}


def test_the_publisher_hears_of_the_end_of_each_round_through_the_folder_alone(world: World) -> None:
    world.publish(1)
    world.obey("receiver.0", *READERS)
    ended = {order.fields["round"] for order in world.orders("close", PUBLISHER)}
    assert ended == {order.fields["round"] for name in READERS for order in world.orders("offer", name)}


def test_many_readers_close_no_group_of_the_others(world: World) -> None:
    for number in range(3, 4 + MAX_CACHED_GROUPS):
        world.join(f"receiver.{number}", by_folder=True)
    for number in (1, 2):
        world.publish(number)
        world.obey(*world.coordination.members)
    groups = [order.fields["membership"] for order in world.orders("transfer", "receiver.0")]
    assert len(groups) == 2 and len(set(groups)) == 1


def test_without_a_folder_at_the_publisher_a_reader_is_offered_nothing() -> None:
    world = World("receiver.0")
    world.join("receiver.1", by_folder=True)
    world.publish(1)
    world.obey("receiver.0", "receiver.1")
    assert (world.member("receiver.0").serving, world.member("receiver.1").serving) == (1, 0)


def test_a_reader_that_gives_up_while_all_is_being_stored_is_not_told_to_read(world: World) -> None:
    world.publish(1)
    rounds = accept(world, *READERS)
    world.coordination.failed("receiver.1", rounds["receiver.1"], "aborted", world.now)
    world.take()
    world.coordination.sent(rounds["receiver.1"], 1, world.now)
    assert not [one for one in world.take() if one.kind == "transfer" and one.to == "receiver.1"]
    assert rounds["receiver.1"] not in [round_.id for round_ in world.coordination.rounds]


def test_a_read_that_breaks_off_says_nothing_of_the_publisher(world: World) -> None:
    world.publish(1)
    rounds = accept(world, *READERS)
    world.coordination.sent(rounds["receiver.1"], 1, world.now)
    world.coordination.failed("receiver.1", rounds["receiver.1"], "transport", world.now)
    world.coordination.send_failed(rounds["receiver.1"], "aborted", world.now, begun_s=NEVER)
    world.take()
    assert PUBLISHER not in world.coordination.culprit
    assert world.member("receiver.1").retry_at > world.now


def test_a_reader_that_failed_once_is_served_alone_no_longer_than_others(world: World) -> None:
    world.publish(1)
    world.member("receiver.1").part_from_others()
    world.obey("receiver.0", *READERS)
    assert world.member("receiver.1").serving == 1 and not world.member("receiver.1").is_lone
