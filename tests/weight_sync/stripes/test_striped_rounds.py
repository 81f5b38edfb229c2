"""Several publishers, each with a stripe of every version: rounds side by side, and one that dies alone."""

from __future__ import annotations

import pytest

from asyncrl.core.errors import WireError
from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.protocol.world import World
from weight_sync.coordination.conversions import obstacles_of, publisher_info_of
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.protocol.members import PublisherInfo
from weight_sync.protocol.messages import PublisherHello
from weight_sync.protocol.rounds import Order
from weight_sync.sync_records import BlameRecord

FIRST, SECOND = Stripe(0, 2), Stripe(1, 2)


class Striped(World):
    """A world with two publishers. A member answers an offer of what it holds as a receiver does."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.held: dict[str, set[tuple[int, int]]] = {name: set() for name in names}
        for stripe in (FIRST, SECOND):
            self.start(stripe, "1")
        for name in names:
            self.join(name)

    def start(self, stripe: Stripe, incarnation: str, number: int = 0) -> None:
        """Start the publisher of a stripe, which has version `number`."""
        publisher = PublisherInfo(incarnation, "127.0.0.1", 1, self.now, started_ms=1, stripe=stripe)
        current = PolicyVersion(number, number - 1) if number else None
        self.coordination.publisher_hello(publisher, current, self.now)

    def publish(self, number: int, *stripes: Stripe) -> None:
        for stripe in stripes or (FIRST, SECOND):
            version, name = PolicyVersion(number, number - 1), stripe.publisher
            self.coordination.published(version, self.now, name=name)

    def obey_order(self, order: Order, loads: bool) -> None:
        if order.kind not in ("offer", "transfer"):
            super().obey_order(order, loads)
            return
        number, stripe = order.fields["number"], self.stripe_of(order)
        if order.kind == "offer" and (number, stripe) not in self.held[order.to]:
            self.coordination.accepted(order.to, order.fields["round"], self.now)
            return
        self.held[order.to].add((number, stripe))
        is_complete = {(number, 0), (number, 1)} <= self.held[order.to]
        self.coordination.verified(order.to, order.fields["round"], number, self.now, "", is_complete)

    def stripe_of(self, order: Order) -> int:
        rounds = [
            one for one in self.sent if one.kind == "offer" and one.fields["round"] == order.fields["round"]
        ]
        return int(rounds[0].fields["stripe"])

    def obey_publishers(self, *stripes: Stripe) -> None:
        for order in self.orders("transfer"):
            if order.to in [stripe.publisher for stripe in stripes]:
                self.coordination.sent(order.fields["round"], 1, self.now)


@pytest.fixture
def world() -> Striped:
    return Striped("receiver.0", "receiver.1")


def everyone(world: Striped) -> tuple[str, ...]:
    return tuple(world.held)


def test_a_version_goes_out_once_all_publishers_have_it_in_one_round_of_each_stripe(world):
    world.publish(1, SECOND)
    world.take()
    assert world.coordination.current is None and not world.orders("offer")
    world.publish(1, FIRST)
    world.obey(*everyone(world))
    world.obey_publishers(FIRST, SECOND)
    world.obey(*everyone(world))
    offers = world.orders("offer", "receiver.0")
    assert [(one.fields["stripe"], one.fields["num_stripes"]) for one in offers] == [(0, 2), (1, 2)]
    assert len(world.orders("transfer", "publisher")) == len(world.orders("transfer", "publisher.1")) == 1
    assert [member.serving for member in world.coordination.members.values()] == [1, 1]
    assert not world.coordination.rounds and not world.coordination.culprit


def test_a_member_is_told_to_load_when_it_holds_all_stripes_and_not_before(world):
    deliver_first_stripe(world)
    assert world.member("receiver.0").staging == 1 and not world.orders("commit")
    for order in world.orders("transfer", "receiver.0"):
        if world.stripe_of(order) == 1:
            world.obey_order(order, loads=True)
    world.take()
    assert world.member("receiver.0").staging is None and world.orders("commit", "receiver.0")


def deliver_first_stripe(world: Striped) -> None:
    """Both stripes are under way, and the members have verified the first."""
    world.publish(1)
    for order in world.take():
        world.obey_order(order, loads=True)
    for order in world.take():
        if order.to in world.held and world.stripe_of(order) == 0:
            world.obey_order(order, loads=True)
    world.obey_publishers(FIRST)


def live(world: Striped, seconds: float, *names: str) -> None:
    """Let time pass. The peers in `names` poll, take offers, and answer aborts; no byte moves."""
    for _ in range(int(seconds / 0.25)):
        world.now += 0.25
        for name in names:
            world.coordination.seen(name, "1", world.now)
        world.coordination.tick(world.now)
        for order in world.take():
            if order.to in names:
                answer(world, order)


def answer(world: Striped, order: Order) -> None:
    if order.kind == "abort" and order.to in world.held:
        world.coordination.failed(order.to, order.fields["round"], "aborted", world.now, 0)
    elif order.kind == "abort":
        world.hear_publisher(order.fields["round"])
    elif order.kind == "offer":
        world.obey_order(order, loads=True)


def test_a_publisher_that_dies_is_blamed_alone_and_its_successor_brings_its_stripe_alone(world):
    deliver_first_stripe(world)
    for name in everyone(world):  # their group has lost its publisher
        rounds = [one.fields["round"] for one in world.orders("transfer", name) if world.stripe_of(one) == 1]
        world.coordination.failed(name, rounds[0], "transport", world.now, 0)
    live(world, 8.0, "publisher", *everyone(world))
    assert world.coordination.culprit == "publisher.1: silent"
    assert not any(member.is_fenced for member in world.coordination.members.values())
    num_offers = len(world.orders("offer"))
    live(world, 5.0, "publisher", *everyone(world))
    assert len(world.orders("offer")) == num_offers, "who holds a stripe waits for the rest"
    world.start(SECOND, "2", number=1)
    num_orders = len(world.sent)
    world.obey(*everyone(world))
    later = [order.to for order in world.sent[num_orders:] if order.kind == "transfer"]
    assert "publisher" not in later, "the first stripe is there"
    assert later.count("publisher.1") == 1
    assert [member.serving for member in world.coordination.members.values()] == [1, 1]


@pytest.mark.parametrize("how", ["silent", "replaced"])
def test_the_rounds_of_other_stripes_go_on_when_a_publisher_is_lost(world, how):
    world.publish(1)
    for order in world.take():
        world.obey_order(order, loads=True)
    world.take()
    if how == "silent":
        live(world, 3.25, "publisher", *everyone(world))
    else:
        world.start(SECOND, "2", number=1)
    broken = {one.stripe: one.is_broken for one in world.coordination.rounds}
    assert not broken[FIRST] and broken.get(SECOND, True), "the second one may be over"


def test_a_version_that_one_publisher_has_lost_goes_out_no_more_and_the_next_one_does(world):
    deliver_first_stripe(world)
    world.start(SECOND, "2")
    assert world.coordination.current is None
    world.publish(2, FIRST)
    assert world.coordination.current is None
    world.publish(2, SECOND)
    assert world.coordination.current == PolicyVersion(2, 1)


def test_publishers_that_disagree_on_their_number_send_nothing_and_the_status_says_so(world):
    world.start(Stripe(1, 3), "2")
    world.publish(1)
    world.obey(*everyone(world))
    assert world.coordination.current is None and not world.orders("offer")
    (found,) = obstacles_of(world.coordination)
    assert "publisher says 2, publisher.1 says 3" in found.reason
    world.start(SECOND, "3", number=1)
    assert not list(obstacles_of(world.coordination))
    assert world.coordination.current == PolicyVersion(1, 0)


def test_a_member_that_falls_silent_is_blamed_once_for_all_stripes(world):
    world.publish(1)
    for order in world.take():
        world.obey_order(order, loads=True)
    live(world, 6.0, "publisher", "publisher.1", "receiver.1")
    blames = [one.culprit for one in world.coordination.take_records() if isinstance(one, BlameRecord)]
    assert blames == ["receiver.0"]


def test_an_abort_that_each_of_two_publishers_left_unanswered_is_none_that_one_left_twice(world):
    world.publish(1)
    for order in world.take():
        world.obey_order(order, loads=True)
    world.take()
    for order in world.orders("transfer", "receiver.0"):
        world.coordination.failed("receiver.0", order.fields["round"], "transport", world.now, 0)
    for _ in range(8):
        for name in ("publisher", "publisher.1"):
            world.coordination.seen(name, "1", world.now)
        live(world, 0.25, *everyone(world))
    assert world.coordination.counters["rounds_failed"] == 2 and not world.coordination.culprit


def test_seats_of_a_publisher_that_has_none_change_nothing(world):
    world.coordination.seats_changed("publisher.1", 2, world.now)
    assert world.coordination.publisher.seats == 0


def test_a_hello_in_the_name_of_another_stripes_publisher_is_refused():
    hello = PublisherHello(
        name="publisher", incarnation="1", store_host="h", store_port=1, stripe=1, num_stripes=2
    )
    with pytest.raises(WireError, match=r"publisher says that it sends stripe 1 of 2"):
        publisher_info_of(hello, 0.0)
