"""A service that has nothing but a desk, on a real server."""

from __future__ import annotations

import threading

from asyncrl.core.errors import RemoteError
from asyncrl.core.rpc import Request, Server
from asyncrl.core.rpc.operations import Operations
from asyncrl.core.runtime.threads import ThreadEvent
from tests.weight_sync.direct.members import RUNTIME, WAIT_S
from weight_sync.backends.contract import Group
from weight_sync.direct.desk import Desk
from weight_sync.transfer_executor import TransferOrder


class Service:
    """A server that has nothing but a desk; it may go away, and another one come in its place."""

    def __init__(self, secret: str, address: str = "tcp://127.0.0.1:*") -> None:
        self.desk = Desk(RUNTIME, secret)
        self.is_complete = ThreadEvent()
        self.desk.on_change = lambda: self.is_complete.set() if self.desk.num_seats else None
        self.ends: list[tuple[str, str, int]] = []
        self.has_ended = ThreadEvent()
        self.progress: list[int] = []
        self.refused: list[str] = []
        """Operations that are refused once."""
        self._ops = Operations("the test")
        self.desk.add_operations(self._ops)
        self.server = Server(RUNTIME, address)
        self._stop = ThreadEvent()
        self._thread = threading.Thread(target=self.server.serve, args=(self, self._stop), daemon=True)
        self._thread.start()

    def handle(self, request: Request) -> None:
        if request.op in self.refused:
            self.refused.remove(request.op)
            raise RemoteError("refused once")
        self._ops.handle(request)

    def wake_at(self) -> float:
        return self.desk.wake_at()

    def tick(self, now: float) -> None:
        self.desk.tick()

    def carry(self, order: TransferOrder) -> None:
        self.has_ended.clear()
        self.server.call_soon(lambda: self.desk.carry(order, (), self.progress.append, self._end))

    def _end(self, *end: object) -> None:
        self.ends.append(end)
        self.has_ended.set()

    def abort(self, round_id: int) -> None:
        self.server.call_soon(lambda: self.desk.abort(round_id))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)


def carry(
    publisher: Service,
    receiver: Service,
    number: int,
    round_id: int,
    *,
    ranks: tuple[int, int],
    port: int,
    membership: int = 1,
    deadline_s: float = WAIT_S,
) -> None:
    """Order a transfer at both desks.

    Args:
        ranks: Numbers of sources and of sinks.
        port: Of the store where the members meet.
    """
    for service, rank in ((publisher, 0), (receiver, ranks[0])):
        group = Group(membership, rank, sum(ranks), "127.0.0.1", port)
        live = frozenset([membership])
        service.carry(TransferOrder(round_id, number, group, live, deadline_s, sources=ranks[0]))


def await_ends(*services: Service) -> list[str]:
    """Return the cause of the end at each desk."""
    assert all(service.has_ended.wait(2 * WAIT_S) for service in services), [one.ends for one in services]
    return [service.ends[-1][0] for service in services]
