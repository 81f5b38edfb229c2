"""Direct rounds in the protocol: who takes part, ranks in the group, the way back to staged copies."""

from __future__ import annotations

import pytest

from tests.weight_sync.protocol.world import TIMING, World
from weight_sync.protocol.protocol import PUBLISHER
from weight_sync.protocol.rounds import DIGEST, SUPERSEDED, TRANSPORT, Lane, Round


class DirectWorld(World):
    """A learner of four ranks, and receivers whose engines have workers as given by name."""

    def __init__(
        self, seats: dict[str, int], *, sources: int = 4, node: str = "", uses_delta: bool = False
    ) -> None:
        super().__init__(*seats, node=node, uses_delta=uses_delta)
        self.coordination._state.uses_direct = True
        self.coordination.seats_changed(PUBLISHER, sources, self.now)
        for name, num_seats in seats.items():
            self.coordination.seats_changed(name, num_seats, self.now)

    def begin(self, number: int) -> Round:
        """Publish a version, and let its direct round begin."""
        self.publish(number)
        self.take()
        round_ = self.find(Lane.DIRECT)
        for name in round_.parts:
            self.coordination.accepted(name, round_.id, self.now)
        self.take()
        return round_

    def find(self, lane: Lane) -> Round:
        return next(round_ for round_ in self.coordination.rounds if round_.lane is lane)

    def lanes(self) -> set[Lane]:
        return {round_.lane for round_ in self.coordination.rounds}

    def end(self, round_: Round, *verified: str) -> None:
        self.coordination.sent(round_.id, 100, self.now)
        for name in verified:
            self.coordination.verified(name, round_.id, round_.version.number, self.now)


def test_engine_workers_have_the_ranks_behind_those_of_the_learner():
    world = DirectWorld({"a": 2, "b": 1, "c": 4})
    round_ = world.begin(1)
    found = {order.to: order.fields for order in world.orders("transfer")}
    assert {name: fields["rank"] for name, fields in found.items()} == {PUBLISHER: 0, "a": 4, "b": 6, "c": 7}
    assert {(fields["world"], fields["sources"]) for fields in found.values()} == {(11, 4)}
    assert all(order.fields["direct"] for order in world.orders("offer"))
    world.end(round_, "a", "b", "c")
    world.obey("a", "b", "c")
    assert set(world.states().values()) == {"READY"}
    again = world.begin(2)
    assert again.membership == round_.membership, "the group is kept for the next version"


def test_who_has_no_seats_gets_the_version_staged_beside_the_direct_round():
    world = DirectWorld({"a": 2, "b": 0})
    world.begin(1)
    assert world.lanes() == {Lane.DIRECT, Lane.MAIN}
    assert list(world.find(Lane.MAIN).parts) == ["b"]
    (offer,) = world.orders("offer", "b")
    assert not offer.fields["direct"]


def test_without_the_learners_seats_all_is_staged():
    world = DirectWorld({"a": 2}, sources=0)
    world.publish(1)
    assert world.lanes() == {Lane.MAIN}


def test_members_of_the_publishers_node_go_directly_too_and_map_once_that_has_failed():
    world = DirectWorld({}, node="n")
    world.join("a", node="n", seats=1)
    round_ = world.begin(1)
    world.coordination.failed("a", round_.id, TRANSPORT, world.now)
    world.hear_publisher(round_.id)
    assert world.lanes() == {Lane.MAPPED}


def test_a_failed_direct_round_blames_nobody_and_all_that_lack_the_version_get_it_staged():
    world = DirectWorld({"a": 1, "b": 1})
    round_ = world.begin(1)
    world.coordination.verified("a", round_.id, 1, world.now)
    world.coordination.failed("b", round_.id, DIGEST, world.now)
    world.coordination.sent(round_.id, 100, world.now)
    assert world.lanes() == {Lane.MAIN} and list(world.find(Lane.MAIN).parts) == ["b"]
    assert not world.coordination.culprit and not world.member("b").is_fenced
    assert world.coordination.counters["direct_fallbacks"] == 1
    world.obey("a", "b")
    assert world.states() == {"a": "READY", "b": "READY"}
    assert set(world.begin(2).parts) == {"a", "b"}, "the next version goes directly again"


def test_the_more_often_it_fails_the_more_versions_are_staged_until_one_arrives():
    world = DirectWorld({"a": 1})
    staged = []
    for number in range(1, 12):
        world.publish(number)
        if world.lanes() == {Lane.DIRECT}:
            round_ = world.find(Lane.DIRECT)
            world.coordination.failed("a", round_.id, TRANSPORT, world.now)
            world.hear_publisher(round_.id)
        else:
            staged.append(number)
        world.obey("a")
    assert staged == [3, 5, 6, 7, 9, 10, 11]


def test_a_version_that_the_learner_no_longer_holds_costs_no_further_one():
    world = DirectWorld({"a": 1})
    for number in (1, 2, 3):
        round_ = world.begin(number)
        world.coordination.send_failed(round_.id, SUPERSEDED, world.now)
        world.coordination.failed("a", round_.id, "aborted", world.now)
        assert world.lanes() == {Lane.MAIN}
        world.obey("a")
    assert not world.coordination.culprit


def test_a_worker_that_was_started_anew_makes_another_group():
    world = DirectWorld({"a": 1, "b": 1})
    first = world.begin(1)
    world.end(first, "a", "b")
    world.obey("a", "b")
    world.coordination.seats_changed("b", 1, world.now)
    assert world.begin(2).membership != first.membership


def test_a_receiver_that_says_hello_again_is_in_another_group_as_its_workers_may_be_other_ones():
    """What it would have told of them may be lost: for that it says hello."""
    world = DirectWorld({"a": 2})
    first = world.begin(1)
    world.end(first, "a")
    world.obey("a")
    world.join("a", serving=1, seats=2)
    assert world.begin(2).membership != first.membership


def test_a_learner_whose_ranks_are_other_ones_breaks_the_direct_round_and_it_goes_staged():
    world = DirectWorld({"a": 1})
    round_ = world.begin(1)
    world.coordination.seats_changed(PUBLISHER, 0, world.now)
    assert world.orders("abort", PUBLISHER) == [] and world.take()
    assert {order.to for order in world.orders("abort")} == {PUBLISHER, "a"}
    world.coordination.failed("a", round_.id, "aborted", world.now)
    world.hear_publisher(round_.id)
    assert world.lanes() == {Lane.MAIN} and not world.coordination.culprit


def test_a_direct_version_that_its_engine_has_lost_is_sent_again_staged():
    world = DirectWorld({"a": 1})
    round_ = world.begin(1)
    world.end(round_, "a")
    world.take()
    assert world.orders("commit", "a")
    world.coordination.loaded("a", 1, False, "not on this worker", world.now)
    world.coordination.lost("a", 1, world.now)
    assert world.lanes() == {Lane.MAIN}
    world.obey("a")
    assert world.states() == {"a": "READY"}


def test_a_silent_member_is_left_out_of_a_direct_round_and_the_others_go_on_staged():
    world = DirectWorld({"a": 1, "b": 1})
    round_ = world.begin(1)
    world.pass_time(TIMING.silence_s + 0.5, "a")
    world.coordination.failed("a", round_.id, "aborted", world.now)
    world.hear_publisher(round_.id)
    assert world.coordination.culprit.startswith("b:")
    world.obey("a")
    assert world.states()["a"] == "READY" and world.states()["b"] == "SUSPECT"


def bases(world: DirectWorld) -> list[tuple[bool, int]]:
    """Return for each transfer whether it was direct, and its base."""
    transfers = [order.fields for order in world.orders("transfer", PUBLISHER)]
    return [(bool(fields["sources"]), fields["base"]) for fields in transfers]


def send(world: DirectWorld, number: int, *names: str) -> None:
    """Let members of a direct round get a version, and load it."""
    world.end(world.begin(number), *names)
    world.obey(*names)


def test_a_direct_round_has_the_base_that_the_workers_of_all_its_members_hold():
    world = DirectWorld({"a": 1, "b": 2}, uses_delta=True)
    for number in (1, 2, 3):
        send(world, number, "a", "b")
    assert bases(world) == [(True, 0), (True, 1), (True, 2)]
    assert {order.fields["base"] for order in world.orders("transfer", "b")} == {0, 1, 2}


def test_without_delta_no_direct_round_has_a_base():
    world = DirectWorld({"a": 1})
    for number in (1, 2):
        send(world, number, "a")
    assert bases(world) == [(True, 0), (True, 0)]


def test_what_came_directly_is_no_base_of_staged_differences_and_the_other_way_round():
    world = DirectWorld({"a": 1}, uses_delta=True)
    send(world, 1, "a")
    world.coordination.seats_changed(PUBLISHER, 0, world.now)
    for number in (2, 3):
        world.publish(number)
        world.obey("a")
    world.coordination.seats_changed(PUBLISHER, 4, world.now)
    for number in (4, 5):
        send(world, number, "a")
    assert bases(world) == [(True, 0), (False, 0), (False, 2), (True, 0), (True, 4)]


def test_one_member_that_has_joined_makes_all_get_the_next_version_whole():
    world = DirectWorld({"a": 1}, uses_delta=True)
    send(world, 1, "a")
    world.join("b")
    world.obey("b")
    world.coordination.seats_changed("b", 1, world.now)
    for number in (2, 3):
        send(world, number, "a", "b")
    assert bases(world) == [(True, 0), (False, 0), (True, 0), (True, 2)]


def test_after_a_mismatch_the_version_goes_staged_and_the_next_one_whole():
    world = DirectWorld({"a": 1, "b": 1}, uses_delta=True)
    send(world, 1, "a", "b")
    round_ = world.begin(2)
    world.coordination.verified("a", round_.id, 2, world.now)
    world.coordination.failed("b", round_.id, DIGEST, world.now)
    world.coordination.sent(round_.id, 100, world.now)
    assert (world.member("a").direct_base, world.member("b").direct_base) == (2, 0)
    world.obey("a", "b")
    for number in (3, 4):
        send(world, number, "a", "b")
    assert bases(world) == [(True, 0), (True, 1), (False, 0), (True, 0), (True, 3)]


@pytest.mark.parametrize("what", ["seats", "restart", "failed load", "hello"])
def test_an_engine_that_has_lost_what_it_held_gets_the_next_version_whole(what):
    world = DirectWorld({"a": 1}, uses_delta=True)
    send(world, 1, "a")
    assert world.member("a").direct_base == 1
    if what == "seats":
        world.coordination.seats_changed("a", 1, world.now)
    elif what == "restart":
        world.coordination.restarted("a", 0, world.now)
    elif what == "failed load":
        world.coordination.loaded("a", 1, False, "broken", world.now)
    else:
        world.join("a", serving=1, seats=1)
    assert world.member("a").direct_base == 0


def test_a_member_that_says_hello_again_tells_what_its_workers_hold():
    world = DirectWorld({"a": 1}, uses_delta=True)
    send(world, 1, "a")
    world.join("a", serving=1, seats=1, direct_base=1)
    send(world, 2, "a")
    assert bases(world)[-1] == (True, 1)


def test_the_same_members_are_in_another_group_when_they_get_the_version_staged():
    world = DirectWorld({"a": 1, "b": 1})
    direct = world.begin(1)
    for name in ("a", "b"):
        world.coordination.failed(name, direct.id, DIGEST, world.now)
    world.coordination.sent(direct.id, 100, world.now)
    staged = world.find(Lane.MAIN)
    for name in ("a", "b"):
        world.coordination.accepted(name, staged.id, world.now)
    assert staged.membership and staged.membership != direct.membership
    world.obey("a", "b")
    assert world.orders("transfer")[-1].fields["sources"] == 0


def test_who_is_served_alone_or_reads_the_folder_is_in_no_direct_round():
    world = DirectWorld({"a": 1, "b": 1, "c": 1})
    world.member("a").part_from_others()
    world.member("b").by_folder = True
    assert set(world.begin(1).parts) == {"c"}


def test_one_version_that_arrives_directly_makes_good_the_failures_before_it():
    world = DirectWorld({"a": 1})
    lanes = []
    for number in range(1, 6):
        world.publish(number)
        (lane,) = world.lanes()
        lanes.append(lane)
        if lane is Lane.DIRECT and number != 2:
            round_ = world.find(Lane.DIRECT)
            world.coordination.failed("a", round_.id, TRANSPORT, world.now)
            world.hear_publisher(round_.id)
        world.obey("a")
    assert lanes == [Lane.DIRECT, Lane.DIRECT, Lane.DIRECT, Lane.DIRECT, Lane.MAIN]


def test_an_engine_that_comes_during_a_direct_round_waits_for_the_next_one():
    world = DirectWorld({"a": 1, "b": 0})
    world.coordination.pin("b", world.now)
    first = world.begin(1)
    world.coordination.seats_changed("b", 1, world.now)
    world.coordination.unpin("b", world.now)
    assert [round_.lane for round_ in world.coordination.rounds] == [Lane.DIRECT]
    world.end(first, "a")
    assert list(world.find(Lane.DIRECT).parts) == ["b"]


def test_other_ranks_of_the_learner_make_another_group():
    world = DirectWorld({"a": 1})
    first = world.begin(1)
    world.end(first, "a")
    world.obey("a")
    world.coordination.seats_changed(PUBLISHER, 4, world.now)
    assert world.begin(2).membership != first.membership
