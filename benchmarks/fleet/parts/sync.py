"""Computation of weight sync's coordinator per version, for a fleet of any size.

Owns a publisher and receivers that obey each order at once, so that the coordinator finds the reports of many
together, at most a turn of its server; the protocol is the real one, and its processor time alone counts.
"""

from __future__ import annotations

import time
from collections import deque

from asyncrl.core.errors import SyncError
from asyncrl.core.staleness import UNLOADED, PolicyVersion
from weight_sync.protocol.members import PublisherInfo
from weight_sync.protocol.messages import ReceiverHello
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.rounds import Order, Timing

DEADLINE_S = 60.0
INCARNATION = "1"
MAX_TURN = 256
"""Reports that the coordinator's server takes before it looks at what they led to, see `asyncrl.core.rpc`."""


class SyncFleet:
    """A coordinator with `num_members` that swap all at once."""

    def __init__(self, num_members: int) -> None:
        self._coordination = Coordination(Timing.of(DEADLINE_S), parallelism=num_members)
        self._names = [f"receiver.{index}" for index in range(num_members)]
        self._number = 0
        self._now_s = 0.0
        self._coordination.publisher_hello(PublisherInfo(INCARNATION, "", 0, 0.0), None, 0.0)
        for name in self._names:
            info = ReceiverHello(
                name=name,
                incarnation=INCARNATION,
                serving=UNLOADED,
                staged=UNLOADED,
                attended=True,
                pinned=False,
            )
            self._coordination.hello(info, 0.0)
        self._coordination.take_orders()

    def sync(self, num_versions: int) -> float:
        """Bring so many versions to everyone, and return the processor seconds.

        Raises:
            SyncError: A version did not reach everyone.
        """
        began_s = time.thread_time()
        for _ in range(num_versions):
            self._number += 1
            self._now_s += 0.1
            self._coordination.published(PolicyVersion(self._number, self._number), self._now_s)
            self._obey()
        seconds = time.thread_time() - began_s
        late = [one.name for one in self._coordination.members.values() if one.serving != self._number]
        if late:
            raise SyncError(f"version {self._number} did not reach {len(late)} of {len(self._names)}")
        return seconds

    def _obey(self) -> None:
        orders = deque(self._coordination.take_orders())
        while orders:
            for _ in range(min(len(orders), MAX_TURN)):
                self._do(orders.popleft())
            orders += self._coordination.take_orders()
            self._coordination.take_records()

    def _do(self, order: Order) -> None:
        now_s, coordination = self._now_s, self._coordination
        coordination.seen(order.to, INCARNATION, now_s)
        if order.to == PUBLISHER:
            if order.kind == "transfer":
                coordination.sent(order.fields["round"], 1, now_s)
        elif order.kind == "offer":
            coordination.accepted(order.to, order.fields["round"], now_s)
        elif order.kind == "transfer":
            coordination.verified(order.to, order.fields["round"], order.fields["number"], now_s)
        elif order.kind == "commit":
            coordination.loaded(order.to, order.fields["number"], True, "", now_s)
