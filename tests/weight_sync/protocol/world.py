"""A coordination in a world that is turned by hand: no processes, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.core.staleness import PolicyVersion
from weight_sync.protocol.members import Member, PublisherInfo
from weight_sync.protocol.messages import ReceiverHello
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.rounds import Order, Timing

TIMING = Timing(deadline_s=10.0, offer_s=2.0, settle_s=1.0, silence_s=3.0, dead_s=30.0)


def receiver_hello(name: str, incarnation: str, **fields: Any) -> ReceiverHello:
    """Return the hello of a receiver that has nothing, but for `fields`."""
    held = {"serving": 0, "staged": 0, "attended": False, "pinned": False} | fields
    return ReceiverHello(name=name, incarnation=incarnation, **held)


class PromptCoordination(Coordination):
    """One whose server has turns of one message: what follows from an event is there at once."""

    def _note_change(self, now: float, name: str = "") -> None:
        super()._note_change(now, name)
        self._settle()


class World:
    """A coordination with a clock and with peers that answer as they are told to.

    Args:
        is_prompt: Without it, events that come between two looks at the orders are settled together.
        node: Of the publisher.
    """

    def __init__(
        self,
        *names: str,
        parallelism: int = 1,
        uses_delta: bool = False,
        is_prompt: bool = True,
        node: str = "",
        timing: Timing = TIMING,
        max_unavailable: float | None = None,
    ) -> None:
        self.now = 100.0
        kind = PromptCoordination if is_prompt else Coordination
        self.coordination = kind(timing, parallelism, uses_delta=uses_delta, max_unavailable=max_unavailable)
        self.sent: list[Order] = []
        self.publisher = "p"
        self.after_step: Callable[[], None] = lambda: None
        self.node = node
        publisher = PublisherInfo("p", "127.0.0.1", 1, self.now, node=node)
        self.coordination.publisher_hello(publisher, None, self.now)
        for name in names:
            self.join(name)

    def join(self, name: str, incarnation: str = "1", serving: int = 0, **kwargs: Any) -> None:
        self.coordination.hello(receiver_hello(name, incarnation, serving=serving, **kwargs), self.now)
        self.coordination.attended(name, self.now)

    def publish(self, number: int) -> None:
        path = f"publisher/{number}" if self.node else ""
        num_bytes = 1000 if self.node else 0
        self.coordination.published(PolicyVersion(number, number - 1), self.now, num_bytes, path)

    def take(self) -> list[Order]:
        orders = self.coordination.take_orders()
        self.sent += orders
        return orders

    def obey(self, *names: str, loads: bool = True) -> None:
        """Let `names` and the publisher do all that they are told to."""
        while orders := self.take():
            for order in orders:
                if order.to == PUBLISHER and order.kind == "transfer":
                    self.coordination.sent(order.fields["round"], 1, self.now)
                elif order.to in names:
                    self.obey_order(order, loads)

    def obey_order(self, order: Order, loads: bool) -> None:
        name, fields, coordination = order.to, order.fields, self.coordination
        if order.kind == "offer":
            coordination.accepted(name, fields["round"], self.now)
        elif order.kind in ("transfer", "map"):
            path = f"{name}/{fields['number']}" if order.kind == "transfer" and self.member(name).node else ""
            coordination.verified(name, fields["round"], fields["number"], self.now, path)
        elif order.kind == "commit" and loads:
            coordination.loaded(name, fields["number"], True, "", self.now)

    def hear_publisher(self, round_id: int) -> None:
        """The publisher answers an abort."""
        self.coordination.send_failed(round_id, "aborted", self.now)

    def pass_time(self, seconds: float, *alive: str, is_publisher_alive: bool = True) -> None:
        """Let time pass in small steps while `alive` and the publisher keep polling."""
        for _ in range(int(seconds / 0.25)):
            self.now += 0.25
            if is_publisher_alive:
                self.coordination.seen(PUBLISHER, self.publisher, self.now)
            for name in alive:
                self.coordination.seen(name, self.member(name).incarnation, self.now)
            self.coordination.tick(self.now)
            self.after_step()

    def member(self, name: str) -> Member:
        return self.coordination.members[name]

    def states(self) -> dict[str, str]:
        return {member.name: member.state.value for member in self.coordination.members.values()}

    def orders(self, kind: str, to: str | None = None) -> list[Order]:
        return [order for order in self.sent if order.kind == kind and to in (None, order.to)]
