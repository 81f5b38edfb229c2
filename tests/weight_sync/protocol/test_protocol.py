"""The protocol driven by hand. No processes, no clock."""

from __future__ import annotations

import pytest

from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.protocol.world import TIMING, World, receiver_hello
from weight_sync.protocol.members import ALLOWED, Member, MemberState, PublisherInfo
from weight_sync.protocol.protocol import PUBLISHER


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
    world.hear_publisher(1)
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
    world.coordination.loaded("a", 1, True, "", world.now)
    world.pass_time(TIMING.deadline_s - 0.5, "a", "b")
    assert world.coordination.round is not None and not world.coordination.culprit
    world.pass_time(TIMING.settle_s + 1.0, "a", "b")
    assert world.coordination.culprit.startswith("b:") and world.member("b").is_fenced
    assert not world.member("a").is_fenced


def test_a_member_that_falls_silent_after_everything_was_sent_is_left_out_before_the_deadline():
    world = World("a", "b")
    world.publish(1)
    for name in ("a", "b"):
        world.coordination.accepted(name, 1, world.now)
    world.coordination.sent(1, 1, world.now)
    world.coordination.verified("a", 1, 1, world.now)
    world.pass_time(TIMING.silence_s, "a")
    assert world.coordination.round is None and world.coordination.culprit == "b: silent"


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
    world.coordination.failed("a", 1, "transport", world.now)
    assert not world.member("a").last_error, "who holds the version has not failed"


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
    world.coordination.hello(receiver_hello("a", "1"), world.now)
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
    world.pass_time(TIMING.silence_s - 0.25)
    world.publish(2)
    world.pass_time(0.25)
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
    publisher = PublisherInfo("q", "127.0.0.1", 2, world.now)
    world.coordination.publisher_hello(publisher, None, world.now)
    assert world.coordination.current is None
    world.publish(2)
    world.obey("a")
    first, second = (order.fields["membership"] for order in world.orders("transfer", PUBLISHER))
    assert first != second and world.member("a").serving == 2


def test_a_lost_publisher_breaks_the_round_and_blames_no_member():
    world = World("a")
    world.publish(1)
    world.coordination.accepted("a", 1, world.now)
    world.pass_time(TIMING.silence_s, "a", is_publisher_alive=False)
    world.coordination.failed("a", 1, "aborted", world.now)
    assert not world.member("a").is_fenced
    assert world.coordination.round is None and world.coordination.culprit == "publisher: silent"
    assert world.coordination.counters["rounds_failed/publisher_lost"] == 1


@pytest.mark.parametrize(("num_bytes", "is_served"), [(65_500_000_000, True), (0, False)])
def test_a_version_of_many_bytes_has_time_for_its_memory_its_way_and_its_load(
    num_bytes: int, is_served: bool
) -> None:
    """Qwen3-32B: 33 s for its pages, 95 s over gloo, 22 s to load; `offer_s` is 2, `deadline_s` 10."""
    world = World("a")
    world.coordination.published(PolicyVersion(1, 0), world.now, num_bytes)
    (offer,) = world.take()
    world.pass_time(33.0, "a")
    world.coordination.accepted("a", offer.fields["round"], world.now)
    transfers = [order for order in world.take() if order.kind == "transfer" and order.to == "a"]
    assert bool(transfers) is is_served
    if not is_served:
        return
    world.pass_time(95.0, "a")
    round_id = transfers[0].fields["round"]
    world.coordination.sent(round_id, num_bytes, world.now)
    world.coordination.verified("a", round_id, 1, world.now)
    assert [order.kind for order in world.take() if order.to == "a"] == ["commit"]
    world.pass_time(22.0, "a")
    world.coordination.loaded("a", 1, True, "", world.now)
    assert world.member("a").serving == 1 and world.coordination.counters["versions_published"] == 1
    assert not world.member("a").is_fenced and world.coordination.culprit == ""


def test_there_is_no_way_from_dead_to_ready_but_syncing():
    assert ALLOWED[MemberState.DEAD] == {MemberState.SYNCING} and not ALLOWED[MemberState.RETIRED]
    member = Member("a", "1", 0.0)
    member.move(MemberState.DEAD)
    with pytest.raises(AssertionError, match="no way from DEAD to READY"):
        member.move(MemberState.READY)


def test_the_deadlines_of_a_round_are_put_off_by_a_time_in_which_the_coordinator_stood_still() -> None:
    world = World("a", "b")
    world.publish(1)
    (round_,) = world.coordination.rounds
    round_.settle_until = round_.until + 1.0
    until = round_.until
    round_.shift(3.0)
    assert (round_.until, round_.settle_until) == (until + 3.0, until + 4.0)
