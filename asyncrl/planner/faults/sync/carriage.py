"""The group of a round: bytes on their way from the publisher to all receivers, bucket by bucket.

Owns what a broadcast over torch.distributed does to its members: it begins when all have joined, stands still
while one of them is stopped or cut off, fails for all when one leaves or dies, and ends for each by itself at
its deadline. A member that gave up may still be written to for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from asyncrl.planner.faults.kernel.process import Process
from asyncrl.planner.world import World
from weight_sync.carrier import TransferOrder
from weight_sync.protocol.rounds import DIGEST, TRANSPORT

BUCKET_S = 0.03
NOTICE_S = 0.15
"""How long a member may go on after its group broke."""


class Wires(Protocol):
    """What moves bytes between processes."""

    def can_reach(self, one: Process, other: Process) -> bool:
        """Tell whether bytes pass between them."""

    def garble(self, process: Process, bucket: bytes) -> bytes:
        """Return what arrives of a bucket."""


@dataclass(eq=False)
class Seat:
    """A member's side of a transfer.

    Attributes:
        read: Returns a bucket: of the publisher only.
        write: Takes a bucket in and says whether its digest is right; of receivers only.
        done: Called once, with the cause of a failure or "".
    """

    process: Process
    order: TransferOrder
    read: Callable[[int], bytes] | None
    write: Callable[[int, bytes], bool] | None
    done: Callable[[str], None]
    num_buckets: int = 0
    is_over: bool = False
    is_wrong: bool = False

    def end(self, cause: str) -> None:
        """Tell the member, if it lives."""
        if self.is_over:
            return
        self.is_over = True
        self.process.after(0.0, self.done, cause or (DIGEST if self.is_wrong else ""))


class Carriage:
    """All transfers of a world."""

    def __init__(self, world: World, wires: Wires) -> None:
        self._world, self._wires = world, wires
        self._seats: dict[int, dict[int, Seat]] = {}

    def join(self, seat: Seat, num_buckets: int) -> None:
        """Take part in a round; the seat's `done` is called by its deadline."""
        seats = self._seats.setdefault(seat.order.round, {})
        seats[seat.order.group.rank] = seat
        seat.process.after(seat.order.deadline_s, self._break, seat.order.round, seat)
        if len(seats) == seat.order.group.world:
            self._world.after(BUCKET_S, self._move, seat.order.round, 0, num_buckets)

    def leave(self, process: Process, round_id: int) -> None:
        """A member gives up: the group breaks for all, each of whom notices a little later."""
        for seat in self._seats.get(round_id, {}).values():
            delay_s = self._world.random.uniform(0.0, NOTICE_S)
            self._world.after(delay_s, seat.end, TRANSPORT)

    def _break(self, round_id: int, seat: Seat) -> None:
        if not seat.is_over:
            seat.end(TRANSPORT)
            self.leave(seat.process, round_id)

    def _move(self, round_id: int, index: int, num_buckets: int) -> None:
        seats = self._seats[round_id]
        members = list(seats.values())
        if any(not one.process.is_alive for one in members):
            self.leave(members[0].process, round_id)
            return
        sender = seats[0]
        is_stuck = any(
            one.process.is_stopped or not self._wires.can_reach(sender.process, one.process)
            for one in members
        )
        slowest = max(one.process.slowness for one in members)
        if any(one.is_over for one in members):
            return
        if is_stuck:
            self._world.after(BUCKET_S, self._move, round_id, index, num_buckets)
            return
        assert sender.read is not None, "rank 0 is the publisher"
        bucket = sender.read(index)
        for one in members:
            if one.write is not None:
                is_right = one.write(index, self._wires.garble(one.process, bucket))
                one.is_wrong = one.is_wrong or not is_right
            one.num_buckets = index + 1
        if index + 1 == num_buckets:
            for one in members:
                one.end("")
            return
        self._world.after(BUCKET_S * slowest, self._move, round_id, index + 1, num_buckets)
