"""Copies within a node: who maps, who receives for the others, and what happens when one of them fails."""

from __future__ import annotations

import pytest

from tests.weight_sync.protocol.world import TIMING, World
from weight_sync.protocol.copies.sharing import UNMAPPABLE
from weight_sync.protocol.rounds import ABORTED, DIGEST, SUPERSEDED, TRANSPORT, Lane, Order

ALL = ("a", "b", "c")


def world_of(publisher: str = "", **nodes: str) -> World:
    """Return a world with members on nodes, all of which serve version 1."""
    world = World(node=publisher)
    for name, node in nodes.items():
        world.join(name, node=node)
    world.publish(1)
    world.obey(*nodes)
    assert {member.serving for member in world.coordination.members.values()} == {1}
    world.sent.clear()
    return world


def kinds(orders: list[Order]) -> list[tuple[str, str]]:
    return [(order.to, order.kind) for order in orders if order.kind in ("offer", "transfer", "map")]


def answer(world: World, orders: list[Order], *names: str) -> list[Order]:
    """Let `names` do what these orders say; return those that follow."""
    for order in orders:
        if order.to in names:
            world.obey_order(order, loads=True)
        elif order.to == "publisher" and order.kind == "transfer":
            world.coordination.sent(order.fields["round"], 1000, world.now)
    return world.take()


def finish(world: World, orders: list[Order], *names: str) -> None:
    """Let `names` do what these orders say, and all that follows."""
    while orders:
        orders = answer(world, orders, *names)


def fail(world: World, order: Order, cause: str) -> list[Order]:
    world.coordination.failed(order.to, order.fields["round"], cause, world.now)
    return world.take()


def test_members_on_the_publishers_node_map_its_segment_and_nothing_is_sent():
    world = world_of("n", a="n", b="n")
    world.publish(2)
    orders = world.take()
    assert kinds(orders) == [("a", "map"), ("b", "map")]
    assert {order.fields["path"] for order in orders} == {"publisher/2"}
    answer(world, orders, "a", "b")
    counters = world.coordination.counters
    assert (counters["bytes_mapped"], counters["bytes_copied"], counters["bytes_sent"]) == (4000, 0, 0)
    assert {world.member(name).mapped_from for name in "ab"} == {"publisher"}
    records = [record for record in world.coordination.take_records() if record.number == 2]
    assert [(one.lane, one.holder, one.num_bytes) for one in records] == [("MAPPED", "publisher", 0)]  # type: ignore[union-attr]


@pytest.mark.parametrize("node", ["", "m"])
def test_members_that_see_other_memory_than_the_publisher_get_the_bytes(node):
    world = world_of("n", a=node)
    world.publish(2)
    assert kinds(world.take()) == [("a", "offer")]


def test_of_the_members_of_a_node_one_receives_and_the_others_map_its_verified_copy():
    world = world_of("p", a="n", b="n", c="m")
    world.publish(2)
    offers = world.take()
    assert kinds(offers) == [("a", "offer"), ("c", "offer")]
    transfers = answer(world, offers, "a", "c")
    assert kinds(transfers) == [("publisher", "transfer"), ("a", "transfer"), ("c", "transfer")]
    maps = answer(world, transfers, "a")
    assert kinds(maps) == [("b", "map")] and maps[0].fields["path"] == "a/2"
    answer(world, maps, "b")
    assert world.member("b").mapped_from == "a" and world.member("b").newest == 2
    assert world.member("c").newest == 2, "it is still receiving: nobody of another node waits for it"


@pytest.mark.parametrize("phase", ["offered", "receiving"])
@pytest.mark.parametrize("how", ["silent", "failed", "retired"])
def test_if_the_member_that_receives_is_lost_another_of_its_node_takes_over(phase, how):
    world = world_of("p", a="n", b="n", c="n")
    world.publish(2)
    orders = world.take()
    if phase == "receiving":
        orders = [one for one in answer(world, orders, "a") if one.to == "a"]
        world.sent.clear()
    assert [one.to for one in orders] == ["a"]
    world.after_step = lambda: world.obey("b", "c")
    round_id = orders[0].fields["round"]
    if how == "failed":
        cause = TRANSPORT if phase == "receiving" else "refused: no room"
        world.coordination.failed("a", round_id, cause, world.now)
        world.hear_publisher(round_id)
    elif how == "retired":
        world.coordination.retire("a", world.now)
    world.pass_time(TIMING.silence_s + TIMING.settle_s, "b", "c", *(["a"] if how == "failed" else []))
    assert {world.member(name).serving for name in "bc"} == {2}
    assert [order.to for order in world.orders("transfer") if order.to in "bc"] == ["b"]
    assert [order.to for order in world.orders("map") if order.to in "bc"] == ["c"]


def test_a_joiner_maps_what_its_node_has_though_the_publisher_is_silent():
    world = world_of("p", a="n")
    world.pass_time(TIMING.silence_s + 1.0, "a", is_publisher_alive=False)
    world.join("b", node="n")
    assert kinds(world.take()) == [("b", "map")]


def test_a_joiner_waits_for_the_copy_that_its_node_receives_and_another_does_not():
    world = world_of("p", a="n")
    world.publish(2)
    transfers = answer(world, world.take(), "a")
    world.join("b", node="n")
    world.join("c", node="m")
    assert kinds(world.take()) == [("c", "offer")]
    assert kinds(answer(world, transfers, "a")) == [("b", "map")]


def test_a_member_that_is_served_alone_keeps_nobody_of_its_node_waiting():
    world = world_of("p", a="n", b="n")
    world.member("a").part_from_others()
    world.publish(2)
    assert kinds(world.take()) == [("b", "offer")], "nor does it receive what another one does"
    world = world_of("p", a="n", b="n")
    world.member("a").part_from_others()
    world.member("b").is_pinned = True
    world.publish(2)
    assert kinds(world.take()) == [("a", "offer")]
    world.coordination.unpin("b", world.now)
    assert kinds(world.take()) == [("b", "offer")]


@pytest.mark.parametrize("cause", [f"{UNMAPPABLE}: no memory", DIGEST, SUPERSEDED])
def test_who_cannot_map_gets_the_bytes_and_nobody_is_blamed(cause):
    world = world_of("n", a="n", b="n")
    world.publish(2)
    first, second = world.take()
    offers = fail(world, first, cause)
    assert kinds(offers) == [("a", "offer")], "at once: it waits for nobody else's end"
    finish(world, [second, *offers], "a", "b")
    assert {world.member(name).serving for name in "ab"} == {2}
    assert not world.coordination.culprit and not world.member("a").is_fenced
    assert world.coordination.counters["maps_failed"] == (cause != SUPERSEDED)
    world.publish(3)
    tries_again = not cause.startswith(UNMAPPABLE)
    assert set(kinds(world.take())) == {("a", "map" if tries_again else "offer"), ("b", "map")}


def test_who_could_not_map_from_a_process_maps_from_its_successor():
    world = world_of("p", a="n", b="n")
    world.publish(2)
    maps = answer(world, answer(world, world.take(), "a"), "a")
    (order,) = (one for one in maps if one.kind == "map")
    maps.remove(order)
    finish(world, [*maps, *fail(world, order, f"{UNMAPPABLE}: no memory")], "a", "b")
    assert world.member("b").serving == 2
    world.join("a", "2", node="n")
    orders = world.take()
    assert kinds(orders) == [("a", "map")], "it has lost its copy, and b has one"
    finish(world, orders, "a")
    world.publish(3)
    assert kinds(answer(world, answer(world, world.take(), "a"), "a")) == [("b", "map")]


def test_a_copy_that_stands_still_is_given_up_and_its_member_gets_the_bytes():
    world = world_of("n", a="n", b="n")
    world.publish(2)
    _, second = world.take()
    finish(world, [second], "b")
    world.publish(3)
    orders = world.take()
    assert kinds(orders) == [("b", "map")], "b does not wait for a"
    finish(world, orders, "b")
    world.pass_time(TIMING.offer_s + 0.5, "a", "b")
    assert world.coordination.culprit.startswith("a: ") and world.member("a").is_fenced
    assert not world.member("a").is_lone and not world.member("b").is_fenced
    assert ("a", "map") in kinds(world.take()), "version 3 may be mapped"


def test_a_mapping_outlives_its_publisher_and_ends_with_its_member():
    world = world_of("n", a="n", b="n")
    world.publish(2)
    maps = world.take()
    world.coordination.publisher_leaves(world.now)
    assert world.take() == [], "nobody is told to give up"
    world.coordination.retire("b", world.now)
    assert [(one.to, one.kind) for one in world.take()] == [("b", "abort")]
    answer(world, maps, "a")
    assert world.member("a").serving == 2 or world.member("a").swapping == 2
    records = [one for one in world.coordination.take_records() if one.number == 2]
    assert [one.parts for one in records] == [{"a": "VERIFIED", "b": "LEFT"}]  # type: ignore[union-attr]
    assert not world.coordination.rounds and not world.coordination.culprit


def test_a_mapping_that_its_member_gave_up_is_ordered_again():
    world = world_of("n", a="n")
    world.publish(2)
    (order,) = world.take()
    assert kinds(fail(world, order, ABORTED)) == [("a", "map")]
    assert world.coordination.counters["maps_failed"] == 0


def test_who_maps_is_no_base_of_differences():
    world = World("x", uses_delta=True, node="p")
    world.join("a", node="n")
    world.join("b", node="n")
    world.publish(1)
    world.obey("a", "b", "x")
    assert (world.member("a").base, world.member("b").base) == (1, 0)
    world.publish(2)
    world.obey("a", "b", "x")
    assert [order.fields["base"] for order in world.orders("transfer", "a")] == [0, 1]


def test_rounds_of_copies_are_in_a_lane_of_their_own():
    world = world_of("n", a="n", b="m")
    world.publish(2)
    world.take()
    assert {round_.lane: list(round_.parts) for round_ in world.coordination.rounds} == {
        Lane.MAPPED: ["a"],
        Lane.MAIN: ["b"],
    }


def test_a_new_coordinator_hears_in_hellos_who_has_a_copy():
    world = World(node="p")
    world.publish(1)
    world.join("a", serving=1, node="n", shared=1, shared_path="a/1")
    world.join("b", node="n")
    (order,) = world.take()
    assert (order.to, order.kind, order.fields["path"]) == ("b", "map", "a/1")
