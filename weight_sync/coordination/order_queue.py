"""Orders on their way to peers, and the manifests that offers carry.

Owns what was not acknowledged yet. Invariants: an order is kept until its peer acknowledges it with its
next poll; what acknowledges an order of another coordinator acknowledges none of this one; a report that
comes twice is taken once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from asyncrl.core.rpc import Request
from weight_sync.memory.manifest import Manifest
from weight_sync.protocol.messages import NumberedOrder, Offer
from weight_sync.protocol.rounds import Order
from weight_sync.protocol.state import ID_BITS


@dataclass
class OrderQueue:
    """Orders to one peer that it has not acknowledged, and its parked poll.

    Args:
        last_seq: Number of the last order before those of this box.
    """

    incarnation: str
    last_seq: int
    orders: deque[tuple[int, Order]] = field(default_factory=deque)
    parked: Request | None = None
    parked_until: float = 0.0

    @staticmethod
    def opened(incarnation: str, token: int, before: OrderQueue | None) -> OrderQueue:
        """Return the box of a peer that has said hello to the coordinator with fencing token `token`.

        A poll from before this hello may still come, and acknowledges nothing in it: the peer's box `before`
        was numbered lower, and so were all boxes of older coordinators. (A peer says hello over one
        connection and polls over another, so its poll for the orders of a dead coordinator may well be
        the first that its successor gets after the hello.)
        """
        return OrderQueue(incarnation, before.last_seq if before is not None else token << ID_BITS)

    def put(self, order: Order) -> None:
        """Add an order behind the others."""
        self.last_seq += 1
        self.orders.append((self.last_seq, order))

    def acknowledge(self, seq: int) -> None:
        """The peer has got all orders up to `seq`."""
        while self.orders and self.orders[0][0] <= seq:
            self.orders.popleft()


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
        if isinstance(order.what, Offer) and order.what.number in versions:
            frame = len(frames)
            frames.append(versions[order.what.number].data)
        orders.append(NumberedOrder(seq, order.kind, order.fields, frame))
    return tuple(orders), frames


def forget_versions(versions: dict[int, KnownVersion], keep: Iterable[int]) -> None:
    """Drop the versions that no round and no joiner needs any more."""
    for number in set(versions) - set(keep):
        del versions[number]
