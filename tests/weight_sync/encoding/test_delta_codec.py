"""Both sides of a bucket's way, without a network: what is sent is what arrives, or is refused."""

from __future__ import annotations

import pytest
import torch

from asyncrl.core.errors import SyncError
from tests.weight_sync.protocol.world import World
from weight_sync.encoding.delta_codec import HEAD, WHOLE, DeltaNames, DeltaReceiver, DeltaSender
from weight_sync.encoding.sparse import Code

BASE = torch.arange(256, dtype=torch.uint8)
NEW = BASE.clone()
NEW[10] = 99
NAMES = DeltaNames(["a"], 1)


class Line:
    """What rank 0 broadcasts, kept; then given to a receiver."""

    def __init__(self, *sent: bytes) -> None:
        self.sent = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in sent if data]
        self._is_sending = not sent

    def broadcast(self, bucket: torch.Tensor, until: float, name: str = "") -> None:
        if self._is_sending:
            self.sent.append(bucket.clone())
        else:
            bucket.copy_(self.sent.pop(0))

    def start(self, bucket: torch.Tensor, until: float, name: str = "") -> Line:
        self.broadcast(bucket, until)
        return self

    def wait(self) -> None:
        """It is done already."""

    def turn_round(self) -> Line:
        return Line(*(data.numpy().tobytes() for data in self.sent))


def send(base: torch.Tensor | None) -> Line:
    line = Line()
    DeltaSender([base] if base is not None else None, [2], NAMES).carry(line, 0, NEW, 0.0)
    return line


@pytest.mark.parametrize("base", [BASE, None, ~BASE, NEW])
def test_a_bucket_arrives_whatever_the_sender_s_base_is(base):
    line, bucket = send(base), torch.zeros(256, dtype=torch.uint8)
    receiver = DeltaReceiver([base] if base is not None else None, NAMES)
    receiver.carry(line.turn_round(), 0, bucket, 0.0)
    assert torch.equal(bucket, NEW)


def test_a_receiver_without_the_base_takes_what_comes_and_keeps_in_step():
    line, bucket = send(BASE).turn_round(), torch.zeros(256, dtype=torch.uint8)
    receiver = DeltaReceiver(None, NAMES)
    receiver.carry(line, 0, bucket, 0.0)
    assert not line.sent
    assert not torch.equal(bucket, NEW)


def test_a_difference_that_is_none_is_left_to_the_digest():
    line, bucket = Line(HEAD.pack(Code.GAPS, 2, 7, 3), b"abc"), torch.zeros(256, dtype=torch.uint8)
    receiver = DeltaReceiver([BASE], NAMES)
    receiver.carry(line, 0, bucket, 0.0)
    assert not line.sent
    assert torch.equal(bucket, BASE)


@pytest.mark.parametrize(
    "head",
    [(WHOLE, 1, 0, 255), (Code.GAPS, 2, 1, 257), (Code.BITMAP, 2, 1, 1 << 40), (9, 2, 1, 8)],
)
def test_a_head_that_promises_what_cannot_be_is_refused_before_anything_is_taken(head):
    line = Line(HEAD.pack(*head), b"x")
    with pytest.raises(SyncError, match="bucket 0 has a head"):
        DeltaReceiver([BASE], NAMES).carry(line, 0, torch.zeros(256, dtype=torch.uint8), 0.0)
    assert len(line.sent) == 1


# Which base a round has


def bases(world: World) -> list[int]:
    return [order.fields["base"] for order in world.orders("transfer", to="publisher")]


def test_a_round_has_a_base_if_all_of_its_members_hold_the_same_version():
    world = World("a", "b", uses_delta=True)
    for number in (1, 2, 3):
        world.publish(number)
        world.obey("a", "b")
    assert bases(world) == [0, 1, 2]


def test_without_delta_no_round_has_a_base():
    world = World("a")
    for number in (1, 2):
        world.publish(number)
        world.obey("a")
    assert bases(world) == [0, 0]


def test_members_that_hold_different_versions_get_whole_buckets():
    world = World("a", "b", uses_delta=True)
    for number in (1, 2):
        world.publish(number)
        world.obey("a", "b")
    world.join("b", serving=2, base=1)  # it said hello again: it holds less than was thought
    for number in (3, 4):
        world.publish(number)
        world.obey("a", "b")
    assert bases(world) == [0, 1, 0, 3]


def test_a_member_in_a_round_of_its_own_has_its_own_base():
    world = World("a", "b", uses_delta=True)
    world.publish(1)
    world.obey("a", "b")
    world.coordination.pin("b", world.now)
    world.publish(2)
    world.obey("a", "b")
    world.coordination.unpin("b", world.now)
    world.obey("a", "b")
    assert bases(world) == [0, 1, 1]


def test_after_a_mismatch_whole_buckets_are_next():
    world = World("a", uses_delta=True)
    world.publish(1)
    world.obey("a")
    world.publish(2)
    while orders := world.take():
        for order in orders:
            if order.kind == "transfer" and order.to == "a":
                assert order.fields["base"] == 1
                world.coordination.failed("a", order.fields["round"], "digest", world.now)
            elif order.kind == "transfer":
                world.coordination.sent(order.fields["round"], 1, world.now)
            else:
                world.obey_order(order, loads=True)
    world.pass_time(1.0, "a")
    world.obey("a")
    assert bases(world) == [0, 1, 0]
    assert world.member("a").serving == 2


def test_a_process_that_starts_anew_holds_nothing_and_one_that_comes_back_says_what_it_holds():
    world = World("a", uses_delta=True)
    world.publish(1)
    world.obey("a")
    world.join("a", incarnation="2")
    world.obey("a")
    world.join("a", incarnation="2", serving=1, base=1)
    world.publish(2)
    world.obey("a")
    assert bases(world) == [0, 0, 1]
