"""Orders on their way to peers, and the manifests that some carry.

Owns what was not acknowledged yet. Invariants: an order is kept until its peer acknowledges it with its
next poll; what acknowledges an order of another coordinator acknowledges none of this one; a report that
comes twice is taken once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from asyncrl.core.rpc import Request
from weight_sync.memory.manifest import Manifest
from weight_sync.protocol.messages import MapCopy, NumberedOrder, Offer
from weight_sync.protocol.rounds import Order
from weight_sync.protocol.state import ID_BITS


@dataclass
class OrderQueue:
    """Orders to one peer that it has not acknowledged, and its parked poll.

    Args:
        last_seq: Number of the last order before those of this box.
        rank: Place of the peer among all, by their first hellos.
    """

    incarnation: str
    last_seq: int
    rank: int = 0
    orders: deque[tuple[int, Order]] = field(default_factory=deque)
    parked: Request | None = None
    parked_until: float = 0.0

    @staticmethod
    def opened(incarnation: str, token: int, before: OrderQueue | None, rank: int = 0) -> OrderQueue:
        """Return the box of a peer that has said hello to the coordinator with fencing token `token`.

        A poll from before this hello may still come, and acknowledges nothing in it: the peer's box `before`
        was numbered lower, and so were all boxes of older coordinators. (A peer says hello over one
        connection and polls over another, so its poll for the orders of a dead coordinator may well be
        the first that its successor gets after the hello.)
        """
        last_seq = before.last_seq if before is not None else token << ID_BITS
        return OrderQueue(incarnation, last_seq, rank)

    def put(self, order: Order) -> None:
        """Add an order behind the others."""
        self.last_seq += 1
        self.orders.append((self.last_seq, order))

    def acknowledge(self, seq: int) -> None:
        """The peer has got all orders up to `seq`."""
        while self.orders and self.orders[0][0] <= seq:
            self.orders.popleft()


class OrderQueues:
    """The boxes of all peers.

    Attributes:
        ends_at: When the first parked poll ends, at the latest.
    """

    def __init__(self) -> None:
        self.ends_at = -math.inf
        self._boxes: dict[str, OrderQueue] = {}
        self._polls: deque[tuple[float, str]] = deque()  # by their ends; some were answered before
        self._answerable: set[str] = set()  # all that have orders and a parked poll are among them

    def get(self, name: str) -> OrderQueue | None:
        """Return a peer's box; None for one that has not said hello."""
        return self._boxes.get(name)

    def open(self, name: str, incarnation: str, token: int) -> None:
        """Open a box for a peer that has said hello; see `OrderQueue.opened`."""
        before = self._boxes.get(name)
        rank = len(self._boxes) if before is None else before.rank
        self._boxes[name] = OrderQueue.opened(incarnation, token, before, rank)

    def put(self, order: Order) -> None:
        """Add an order to its peer's box, if that has one."""
        if (box := self._boxes.get(order.to)) is not None:
            box.put(order)
            self._answerable.add(order.to)

    def park(self, name: str, poll: Request, until: float) -> None:
        """Keep a peer's poll until there are orders; later ones end later."""
        box = self._boxes[name]
        box.parked, box.parked_until = poll, until
        self._polls.append((until, name))
        self._answerable.add(name)
        self.ends_at = min(self.ends_at, until)

    def take_answerable(self) -> list[tuple[str, OrderQueue]]:
        """Return the boxes with orders and a parked poll, in the order of the peers' first hellos."""
        names, self._answerable = self._answerable, set()
        found = self._in_order(names)
        return [(name, box) for name, box in found if box.parked is not None and box.orders]

    def take_ended(self, now: float) -> list[tuple[str, OrderQueue]]:
        """Return the boxes whose polls have ended, in the same order, and find the next end."""
        ended, polls = set(), self._polls
        while polls and (polls[0][0] <= now or not self._is_parked(*polls[0])):
            until, name = polls.popleft()
            if self._is_parked(until, name):
                ended.add(name)
        self.ends_at = polls[0][0] if polls else math.inf
        return self._in_order(ended)

    def _is_parked(self, until: float, name: str) -> bool:
        box = self._boxes[name]
        return box.parked is not None and box.parked_until == until

    def _in_order(self, names: Iterable[str]) -> list[tuple[str, OrderQueue]]:
        return sorted(((name, self._boxes[name]) for name in names), key=lambda one: one[1].rank)


class ReportLog:
    """Tells a report that is repeated, because its answer was lost, from a new one."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, int]] = {}

    def newest(self, name: str, incarnation: str) -> int:
        """Return the number of the last report of a process that was taken, 0 for none."""
        known, last = self._last.get(name, ("", 0))
        return last if known == incarnation else 0

    def is_new(self, name: str, incarnation: str, seq: int) -> bool:
        """Note report `seq` of a process; False if it, or a later one, was taken before."""
        known, last = self._last.get(name, ("", 0))
        if known == incarnation and seq <= last:
            return False
        self._last[name] = (incarnation, seq)
        return True


@dataclass(frozen=True)
class KnownVersion:
    """A version's manifest as it came, and what is told of it."""

    data: bytes
    digest: str
    num_bytes: int
    num_buckets: int

    @staticmethod
    def of(data: bytes, manifest: Manifest) -> KnownVersion:
        """Return what is kept of a manifest. The digest is one over those of all buckets."""
        buckets = "".join(bucket.digest for bucket in manifest.buckets)
        return KnownVersion(
            data,
            xxhash.xxh3_128(buckets.encode()).hexdigest(),
            manifest.total_bytes,
            len(manifest.buckets),
        )


def fill(box: OrderQueue, versions: dict[int, KnownVersion]) -> tuple[tuple[NumberedOrder, ...], list[bytes]]:
    """Return the box's orders as they go over the wire, and the frames that they refer to."""
    frames: list[bytes] = []
    orders = []
    for seq, order in box.orders:
        frame = -1
        if isinstance(order.what, Offer | MapCopy) and order.what.number in versions:
            frame = len(frames)
            frames.append(versions[order.what.number].data)
        orders.append(NumberedOrder(seq, order.kind, order.fields, frame))
    return tuple(orders), frames


def forget_versions(versions: dict[int, KnownVersion], keep: Iterable[int]) -> None:
    """Drop the versions that no round and no joiner needs any more."""
    for number in set(versions) - set(keep):
        del versions[number]
