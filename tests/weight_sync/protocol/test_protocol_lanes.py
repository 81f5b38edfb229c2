"""Rounds side by side: joiners, slow members, cached groups, and who is to blame."""

from __future__ import annotations

import pytest

from tests.weight_sync.protocol.world import TIMING, World
from weight_sync.protocol.protocol import PUBLISHER
from weight_sync.protocol.rounds import MAX_CACHED_GROUPS, NEVER, Lane, Round


def accept(world: World, *names: str, lane: Lane = Lane.MAIN) -> Round:
    """All `names` accept the offer of the lane's round."""
    world.take()
    round_ = next(round_ for round_ in world.coordination.rounds if round_.lane is lane)
    for name in names:
        world.coordination.accepted(name, round_.id, world.now)
    world.take()
    return round_


def finish(world: World, round_: Round, *names: str) -> None:
    world.coordination.sent(round_.id, 1, world.now)
    for name in names:
        world.coordination.verified(name, round_.id, round_.version.number, world.now)


def test_a_joiner_in_the_middle_of_a_round_does_not_wait_for_its_end():
    world = World("a")
    world.publish(1)
    main = accept(world, "a")
    world.join("b")
    joiners = accept(world, "b", lane=Lane.JOINERS)
    live = world.orders("transfer", "b")[0].fields["live"]
    assert {main.membership, joiners.membership} <= set(live)
    finish(world, joiners, "b")
    world.obey("b")
    assert world.states()["b"] == "READY" and world.states()["a"] == "SYNCING"
    finish(world, main, "a")
    world.obey("a")
    world.publish(2)
    world.obey("a", "b")
    assert world.orders("transfer", PUBLISHER)[-1].fields["world"] == 3


def test_a_receiver_that_was_started_anew_before_the_transfer_does_not_wait_for_the_end_of_the_round():
    world = World("a", "b")
    world.publish(1)
    main = accept(world, "a")
    world.join("b", incarnation="2")
    joiners = accept(world, "b", lane=Lane.JOINERS)
    finish(world, joiners, "b")
    world.obey("b")
    assert world.states() == {"a": "SYNCING", "b": "READY"}
    finish(world, main, "a")
    world.obey("a")
    assert world.states() == {"a": "READY", "b": "READY"} and not world.coordination.culprit


def test_a_receiver_that_was_started_anew_after_it_had_verified_does_not_wait_for_the_slower_ones():
    world = World("a", "b")
    world.publish(1)
    main = accept(world, "a", "b")
    world.coordination.verified("b", main.id, 1, world.now)
    world.join("b", incarnation="2")
    joiners = accept(world, "b", lane=Lane.JOINERS)
    assert joiners.membership != main.membership and main.parts["a"].value == "RECEIVING"


def test_who_connects_anew_gets_another_group_than_that_of_the_round_it_has_left():
    world = World("a")
    world.publish(1)
    main = accept(world, "a")
    world.pass_time(TIMING.deadline_s - TIMING.settle_s, "a")
    world.join("a")  # the same process; the round that it leaves still waits for the publisher
    joiners = accept(world, "a", lane=Lane.JOINERS)
    assert main in world.coordination.rounds and joiners.membership != main.membership


def test_a_group_in_use_stays_open_however_many_joiners_come_meanwhile():
    world = World("a")
    world.publish(1)
    main = accept(world, "a")
    for number in range(MAX_CACHED_GROUPS + 1):
        world.join(f"b{number}")
        finish(world, accept(world, f"b{number}", lane=Lane.JOINERS), f"b{number}")
        world.obey(f"b{number}")
    assert main.membership in world.orders("transfer", PUBLISHER)[-1].fields["live"]


def test_a_member_that_has_something_to_serve_waits_for_the_main_round_to_end():
    world = World("a", "b")
    world.publish(1)
    world.obey("a", "b")
    world.publish(2)
    main = accept(world, "a", "b")
    finish(world, main, "b")
    world.publish(3)
    assert [round_.lane for round_ in world.coordination.rounds] == [Lane.MAIN]


def test_who_serves_nothing_swaps_before_those_that_generate():
    world = World("a", "b")
    world.publish(1)
    world.obey("a", "b")
    world.publish(2)
    world.obey("a", "b", loads=False)
    assert [order.to for order in world.orders("commit")][2:] == ["a"]
    world.join("c")
    world.obey("c", loads=False)
    world.coordination.loaded("a", 2, True, "", world.now)
    world.take()
    assert [order.to for order in world.orders("commit")][3:] == ["c"]


def time_out(world: World, round_: Round, num_buckets: dict[str, int]) -> None:
    """The transfer does not end; all answer the abort in time, so far had each come."""
    world.pass_time(round_.until - world.now, *world.coordination.members)
    world.take()
    for name, count in num_buckets.items():
        world.coordination.failed(name, round_.id, "aborted", world.now, count)
    world.coordination.send_failed(round_.id, "aborted", world.now)


def test_a_slow_member_holds_the_others_back_once_and_is_served_alone_from_then_on():
    world = World("a", "b", "slow")
    world.publish(1)
    started = world.now
    time_out(world, accept(world, "a", "b", "slow"), {"a": 5, "b": 5, "slow": 1})
    assert world.now - started <= TIMING.deadline_s
    assert not world.coordination.culprit  # who answers is tried again before it is blamed
    main = accept(world, "a", lane=Lane.MAIN)
    finish(world, main, "a")
    lone = accept(world, "b", lane=Lane.LONE)
    assert list(lone.parts) == ["b"]  # it had come further than the slow one
    finish(world, lone, "b")
    lone = accept(world, "slow", lane=Lane.LONE)
    world.obey("a", "b")
    world.publish(2)
    main = accept(world, "a", "b", lane=Lane.MAIN)
    finish(world, main, "a", "b")
    time_out(world, lone, {"slow": 3})
    assert world.coordination.culprit == "slow: deadline without others"
    assert world.member("slow").is_fenced and not world.member("a").is_fenced
    assert not world.member("b").is_lone and world.member("slow").is_lone


def test_who_does_not_answer_an_offer_keeps_the_next_rounds_of_the_others_waiting_no_more():
    world = World("a", "mute")
    world.publish(1)
    world.obey("a")
    world.pass_time(TIMING.offer_s, "a", "mute")
    world.obey("a")
    assert world.member("a").serving == 1
    world.publish(2)
    world.obey("a")
    assert world.member("a").serving == 2, "without any time for the mute one"


def test_who_was_parted_from_the_others_comes_back_to_them_when_it_has_worked():
    world = World("a", "slow")
    world.publish(1)
    time_out(world, accept(world, "a", "slow"), {"a": 5, "slow": 1})
    world.obey("a", "slow")
    for number in (2, 3):
        world.publish(number)
        world.obey("a", "slow")
    worlds = [order.fields["world"] for order in world.orders("transfer", PUBLISHER)]
    assert worlds == [3, 2, 2, 3, 3] and world.states() == {"a": "READY", "slow": "READY"}


def test_no_round_takes_longer_than_the_deadline_however_late_the_offer_is_answered():
    world = World("a", "b")
    world.publish(1)
    world.pass_time(TIMING.offer_s - 0.25, "a", "b")
    round_ = accept(world, "a", "b")
    order = world.orders("transfer", "a")[0]
    assert world.now + order.fields["deadline_s"] + TIMING.settle_s <= round_.started + TIMING.deadline_s
    world.pass_time(TIMING.deadline_s - TIMING.offer_s + 0.25, "a", "b")
    assert round_ not in world.coordination.rounds


def test_a_group_outlives_a_wrong_digest_and_an_offer_that_one_did_not_answer():
    world = World("a", "b")
    world.publish(1)
    round_ = accept(world, "a", "b")
    world.coordination.sent(round_.id, 1, world.now)
    world.coordination.failed("b", round_.id, "digest", world.now)
    world.coordination.verified("a", round_.id, 1, world.now)
    world.obey("a")
    world.pass_time(1.0, "a", "b")
    world.obey("a", "b")
    world.publish(2)
    world.obey("a", "b")
    memberships = [order.fields["membership"] for order in world.orders("transfer", PUBLISHER)]
    assert memberships[0] == memberships[2] != memberships[1]


def test_a_publisher_that_dies_in_a_transfer_to_one_member_is_the_culprit_and_not_the_member():
    world = World("a")
    world.publish(1)
    round_ = accept(world, "a")
    world.coordination.failed("a", round_.id, "transport", world.now)  # its sockets closed
    world.pass_time(TIMING.settle_s, "a", is_publisher_alive=False)
    assert world.coordination.culprit == "publisher: silent"
    assert not world.member("a").is_fenced and not world.member("a").last_error.endswith("others")


def test_a_new_process_is_not_blamed_for_the_failure_of_the_one_before_it():
    world = World("a")
    world.publish(1)
    round_ = accept(world, "a")
    world.coordination.failed("a", round_.id, "transport", world.now)
    world.join("a", incarnation="2")
    world.hear_publisher(round_.id)
    assert not world.coordination.culprit and not world.member("a").is_fenced


LATE, LONE = "publisher: had not begun to send", "a: deadline without others"


@pytest.mark.parametrize(
    ("begun_s", "culprit"), [(NEVER, LATE), (0.0, LATE), (TIMING.deadline_s, LONE)], ids=str
)
def test_a_publisher_that_began_to_send_never_or_when_its_time_was_over_is_the_culprit(
    begun_s: float, culprit: str
) -> None:
    world = World("a")
    world.publish(1)
    round_ = accept(world, "a")
    world.pass_time(round_.until - world.now, "a")
    world.coordination.failed("a", round_.id, "aborted", world.now)
    world.coordination.send_failed(round_.id, "aborted", world.now, begun_s)
    assert world.coordination.culprit == culprit
    assert world.member("a").is_fenced == (culprit == LONE)


def test_a_publisher_that_polls_but_answers_no_abort_is_blamed_the_second_time():
    world = World("a")
    world.publish(1)
    for culprit in ("", "publisher: no answer to aborts"):
        round_ = accept(world, "a")
        world.coordination.failed("a", round_.id, "transport", world.now)
        world.pass_time(TIMING.settle_s, "a")
        assert world.coordination.culprit == culprit and not world.member("a").is_fenced


def test_an_abort_that_a_publisher_answers_ends_the_count_of_those_that_it_did_not():
    world = World("a")
    world.publish(1)
    for answers, lane in ((False, Lane.MAIN), (True, Lane.MAIN), (False, Lane.LONE)):
        round_ = accept(world, "a", lane=lane)
        world.coordination.failed("a", round_.id, "transport", world.now)
        if answers:
            world.hear_publisher(round_.id)
        world.pass_time(2 * TIMING.settle_s, "a")
    assert world.coordination.culprit == "a: transport without others"
    assert world.coordination.counters["rounds_failed"] == 3


def test_bytes_that_are_wrong_for_everyone_are_the_publisher_s_fault():
    world = World("a", "b")
    world.publish(1)
    round_ = accept(world, "a", "b")
    world.coordination.sent(round_.id, 1, world.now)
    for name in ("a", "b"):
        world.coordination.failed(name, round_.id, "digest", world.now)
    assert world.coordination.culprit.startswith("publisher:")
    assert not world.member("a").is_fenced and not world.member("b").is_fenced


def test_who_is_late_when_all_was_sent_and_others_are_done_is_the_culprit():
    world = World("a", "b")
    world.publish(1)
    round_ = accept(world, "a", "b")
    finish(world, round_, "a")
    time_out(world, round_, {"b": 4})
    assert world.coordination.culprit.startswith("b: late") and world.member("b").is_lone


def test_a_coordinator_that_did_not_run_for_a_while_holds_it_against_nobody():
    world = World("a", "b")
    world.publish(1)
    world.obey("a", "b")
    world.pass_time(0.5, "a", "b")
    world.publish(2)
    round_ = accept(world, "a", "b")
    world.now += TIMING.dead_s + 5.0  # SIGSTOP
    world.coordination.seen("a", "1", world.now)  # what had arrived is heard before the first tick
    world.coordination.attended("a", world.now)
    world.coordination.tick(world.now)
    assert world.states() == {"a": "READY", "b": "READY"} and not world.coordination.culprit
    assert round_ in world.coordination.rounds and not round_.is_broken
    finish(world, round_, "a", "b")
    world.obey("a", "b")
    assert world.member("a").serving == world.member("b").serving == 2


def test_an_order_of_a_round_that_is_over_is_never_given_again_under_its_id():
    world = World("a")
    for number in (1, 2):
        world.publish(number)
        world.obey("a")
    ids = [order.fields["round"] for order in world.orders("offer")]
    assert ids == sorted(set(ids))


def test_events_of_rounds_that_are_over_or_unknown_change_nothing():
    world = World("a")
    world.publish(1)
    round_ = accept(world, "a")
    finish(world, round_, "a")
    world.obey("a")
    before = (world.states(), dict(world.coordination.counters))
    for round_id in (round_.id, 999):
        world.coordination.accepted("a", round_id, world.now)
        world.coordination.verified("a", round_id, 1, world.now)
        world.coordination.failed("a", round_id, "transport", world.now)
        world.coordination.sent(round_id, 1, world.now)
        world.coordination.send_failed(round_id, "transport", world.now)
    assert (world.states(), dict(world.coordination.counters)) == before and not world.take()
