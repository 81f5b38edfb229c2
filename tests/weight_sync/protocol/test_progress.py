"""Progress is a sign of life: who goes on is waited for to its deadline, who stands still is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.weight_sync.protocol.world import TIMING, World
from weight_sync.protocol.rounds import STALLED, STANDS_STILL, Timing
from weight_sync.protocol.swap_scheduler import max_loads

STALL_S = 4.0
SLOW = replace(TIMING, deadline_s=100.0, offer_s=40.0, stall_s=STALL_S)


def world_of(*names: str, node: str = "", **kwargs: object) -> World:
    world = World(*names, timing=SLOW, node=node, **kwargs)  # type: ignore[arg-type]
    for name in names:
        world.member(name).node = node
    world.publish(1)
    return world


def begin_transfer(world: World, *names: str) -> int:
    round_id = int(world.take()[0].fields["round"])
    for name in names:
        world.coordination.accepted(name, round_id, world.now)
    world.take()
    return round_id


def go_on(world: World, round_id: int, seconds: float, *names: str) -> None:
    """Let `names` tell a step every second, and nothing else."""
    for _ in range(int(seconds)):
        world.pass_time(1.0)
        for name in names:
            steps = world.coordination.rounds[0].progress.get(name, (0, 0.0))[0] + 1
            world.coordination.progressed(name, round_id, steps, world.now)


def test_a_member_that_makes_progress_is_not_silent():
    world = world_of("a")
    round_id = begin_transfer(world, "a")
    go_on(world, round_id, 5 * TIMING.silence_s, "a")
    assert not world.coordination.culprit and not world.member("a").is_fenced
    (round_,) = world.coordination.rounds
    assert not round_.is_broken


@pytest.mark.parametrize("tells", [True, False])
def test_an_offer_waits_for_who_reserves_memory_and_not_for_who_stands_still(tells):
    world = world_of("a", "b")
    round_id = int(world.take()[0].fields["round"])
    world.coordination.accepted("b", round_id, world.now)
    for step in range(1, int(2 * STALL_S)):
        world.pass_time(1.0, "a", "b")
        world.coordination.progressed("a", round_id, step if tells else 1, world.now)
    assert (world.coordination.culprit == f"a: {STANDS_STILL}") is not tells
    assert bool(world.orders("transfer", "b") or world.take()) is not tells


def test_a_transfer_in_which_nobody_makes_progress_is_given_up_long_before_its_deadline():
    world = world_of("a", "b")
    round_id = begin_transfer(world, "a", "b")
    go_on(world, round_id, 2 * STALL_S, "a", "b")
    assert not world.coordination.rounds[0].is_broken
    world.pass_time(STALL_S - 0.5, "a", "b")
    assert not world.coordination.rounds[0].is_broken
    world.pass_time(0.5, "a", "b")
    assert world.coordination.rounds[0].broken_by == STALLED
    assert {order.kind for order in world.take()} == {"abort"}
    for name in "ab":
        world.coordination.failed(name, round_id, "aborted", world.now)
    world.hear_publisher(round_id)
    records = [record.cause for record in world.coordination.take_records()]  # type: ignore[union-attr]
    assert records == [STALLED] and world.coordination.counters["rounds_failed/aborted"] == 1


def test_one_that_goes_on_is_enough_for_the_others_get_the_same_bytes():
    world = world_of("a", "b")
    round_id = begin_transfer(world, "a", "b")
    for _ in range(int(2 * STALL_S)):
        go_on(world, round_id, 1.0, "a")
        world.pass_time(0.25, "b")
    assert not world.coordination.rounds[0].is_broken


def test_who_stands_still_when_all_was_sent_and_others_are_done_is_the_culprit():
    world = world_of("a", "b")
    round_id = begin_transfer(world, "a", "b")
    world.coordination.sent(round_id, 1, world.now)
    world.coordination.verified("a", round_id, 1, world.now)
    world.pass_time(STALL_S, "a", "b")
    world.coordination.failed("b", round_id, "aborted", world.now)
    world.hear_publisher(round_id)
    assert world.coordination.culprit.startswith("b: late")


def test_of_members_that_map_each_is_judged_by_its_own_progress():
    world = world_of("a", "b", node="n")
    round_id = int(world.take()[0].fields["round"])
    for step in range(1, int(2 * STALL_S)):
        world.pass_time(1.0, "a", "b")
        world.coordination.progressed("a", round_id, step, world.now)
    assert world.coordination.culprit == f"b: {STANDS_STILL}" and not world.member("a").is_fenced
    assert world.coordination.rounds[0].parts["a"] == "RECEIVING"


def test_time_in_which_the_coordinator_did_not_run_is_no_standstill():
    world = world_of("a")
    begin_transfer(world, "a")
    world.now += 10 * STALL_S
    world.coordination.tick(world.now)
    assert not world.coordination.rounds[0].is_broken


def test_a_step_that_is_told_twice_or_late_is_no_progress():
    world = world_of("a")
    round_id = begin_transfer(world, "a")
    (round_,) = world.coordination.rounds
    world.coordination.progressed("a", round_id, 3, world.now)
    moved = round_.moved_at("a")
    world.now += 1.0
    for steps in (3, 2):
        world.coordination.progressed("a", round_id, steps, world.now)
    assert round_.moved_at("a") == moved
    world.coordination.progressed("a", 12345, 4, world.now)


def test_no_standstill_is_shorter_than_a_bucket_takes_at_the_slowest():
    usual = Timing.of(60.0)
    assert (usual.stall_s, Timing.of(4.0).stall_s) == (15.0, 6.0)
    assert usual.for_bytes(10**8).stall_s == pytest.approx(15.4)
    assert usual.for_bytes(10**12).stall_s == usual.for_bytes(1 << 30).stall_s < 20.0
    assert usual.for_bytes(10**12).deadline_s > 6000.0


# The share of the fleet that may load at once


@pytest.mark.parametrize(
    ("parallelism", "share", "most"), [(3, None, 3), (8, 0.5, 4), (2, 0.5, 2), (8, 0.01, 1), (7, 1.0, 7)]
)
def test_no_more_members_load_at_once_than_parallelism_and_the_share_allow(parallelism, share, most):
    names = [f"m{index}" for index in range(8)]
    world = World(*names, parallelism=parallelism, max_unavailable=share)
    world.publish(1)
    world.obey(*names, loads=False)
    assert len(world.orders("commit")) == most == max_loads(parallelism, share, 8)
    world.obey_order(world.orders("commit")[0], loads=True)
    world.obey(*names, loads=False)
    assert len(world.orders("commit")) == most + 1, "the next one follows"


def test_members_that_are_gone_are_no_part_of_the_fleet():
    names = [f"m{index}" for index in range(8)]
    world = World(*names, parallelism=8, max_unavailable=0.5)
    for name in names[4:]:
        world.coordination.retire(name, world.now)
    world.publish(1)
    world.obey(*names, loads=False)
    assert len(world.orders("commit")) == 2
