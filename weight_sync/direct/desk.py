"""Desk of a publisher or a receiver: the processes that carry out its direct transfers ask it for orders.

Owns the seats (see `orders`) and the one transfer that they carry out. The publisher's seats are on any node,
a receiver's beside it. Invariants: a transfer is done once, when all seats have ended it or one has failed;
after a failure no seat counts before it has asked again, as one of them may be dead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from asyncrl.core.files.private import derive_name
from asyncrl.core.rpc import Request
from asyncrl.core.rpc.message import Answer, Done
from asyncrl.core.rpc.operations import Operations, send_answer
from asyncrl.core.runtime.clock import Clock
from weight_sync.direct.orders import ASK_ORDER, SEAT_ENDED, AskOrder, OfSeat, SeatEnded, SeatOrder
from weight_sync.protocol.rounds import TRANSPORT
from weight_sync.transfer_executor import TransferOrder

SILENCE_S, CARRYING_SILENCE_S = 10.0, 3.0
"""A seat asks at least every second; an engine's worker may be busy for some. In a transfer it asks twice as
often: gloo may not wake a seat whose peer has died (`transports.gloo`), and it waits for this limit."""
OnProgress = Callable[[int], None]
OnDone = Callable[[str, str, int], None]
"""Called with the cause of a failure or "", its message, and the bytes that all seats have carried."""


@dataclass
class _Seat:
    incarnation: str
    heard: float
    parked: Request | None = None
    until: float = math.inf
    num_steps: int = 0


@dataclass
class _Transfer:
    order: TransferOrder
    keep: tuple[int, ...]
    on_progress: OnProgress
    on_done: OnDone
    open_seats: set[int] = field(default_factory=set)
    num_bytes: int = 0


class Desk:
    """See the module. All methods are called by one thread, the service's.

    Args:
        secret: Of the run; each group gets one that is made from it.
        is_tagged: As in `SeatOrder`.

    Attributes:
        on_change: Called when another number of processes can take part, or other ones.
        on_loss: Called before that when a seat is another process than before, or silent.
    """

    def __init__(self, clock: Clock, secret: str, *, is_tagged: bool = False) -> None:
        self._clock, self._secret, self._is_tagged = clock, secret, is_tagged
        self.on_change: Callable[[], None] = lambda: None
        self.on_loss: Callable[[], None] = lambda: None
        self._seats: dict[int, _Seat] = {}
        self._doubted: set[int] = set()
        self._count = self._told = 0
        self._transfer: _Transfer | None = None

    @property
    def num_seats(self) -> int:
        """Number of seats; 0 unless all of them ask for orders."""
        return self._count if len(self._seats) - len(self._doubted) == self._count else 0

    def add_operations(self, ops: Operations) -> None:
        """Have `ops` take the calls of seats."""
        ops.add(ASK_ORDER, self._take_ask)
        ops.add(SEAT_ENDED, self._take_end)

    def carry(
        self, order: TransferOrder, keep: Iterable[int], on_progress: OnProgress, on_done: OnDone
    ) -> None:
        """Have the seats carry out a transfer; `on_done` is called once, unless it is aborted before."""
        self._transfer = _Transfer(order, tuple(sorted(keep)), on_progress, on_done, set(self._seats))
        for seat in self._seats.values():
            seat.num_steps = 0
        if not self._count or len(self._seats) != self._count:
            self._finish(TRANSPORT, "not all processes that are to take part are there")
        self._answer_all()

    def abort(self, round_id: int) -> None:
        """Have the seats give up a round; nobody is called."""
        if self._transfer is not None and self._transfer.order.round == round_id:
            self._transfer = None
            self._doubt()

    def wake_at(self) -> float:
        """Return when a poll is over, or a seat silent."""
        seats = self._seats.items()
        return min((min(seat.until, self._silent_at(index)) for index, seat in seats), default=math.inf)

    def tick(self) -> None:
        """Answer polls that are over; give up silent seats."""
        now = self._clock.now()
        for index, seat in list(self._seats.items()):
            if now >= seat.until:
                self._answer(index, seat)
            if now >= self._silent_at(index):
                del self._seats[index]
                self._doubted.discard(index)
                self._lose(f"seat {index} is silent")
                self._tell()

    def _silent_at(self, index: int) -> float:
        is_carrying = self._transfer is not None and index in self._transfer.open_seats
        return self._seats[index].heard + (CARRYING_SILENCE_S if is_carrying else SILENCE_S)

    def _take_ask(self, request: Request, asked: AskOrder) -> None:
        seat = self._meet(asked)
        if seat.parked is not None:
            self._answer(asked.index, seat)  # the seat asks anew, and reads no older answer
        seat.parked, seat.until = request, self._clock.now() + asked.wait_s
        transfer = self._transfer
        round_id = transfer.order.round if transfer is not None else 0
        if asked.round != round_id:
            self._answer(asked.index, seat)
        elif transfer is not None and asked.num_steps > seat.num_steps:
            seat.num_steps = asked.num_steps
            transfer.on_progress(sum(one.num_steps for one in self._seats.values()))

    def _take_end(self, request: Request, asked: SeatEnded) -> Done:
        self._meet(asked)
        transfer = self._transfer
        if transfer is None or transfer.order.round != asked.round:
            return Done()
        if asked.index in transfer.open_seats:
            transfer.open_seats.discard(asked.index)
            transfer.num_bytes += asked.num_bytes
            if asked.cause or not transfer.open_seats:
                self._finish(asked.cause, f"seat {asked.index}: {asked.message}" if asked.cause else "")
        return Done()

    def _meet(self, asked: OfSeat) -> _Seat:
        """Note that a seat lives; one that is another process than before has nothing of the transfer."""
        now, seat = self._clock.now(), self._seats.get(asked.index)
        if seat is not None and seat.incarnation == asked.incarnation and asked.count == self._count:
            seat.heard = now
            self._doubted.discard(asked.index)
            self._tell()
            return seat
        if asked.count != self._count:
            self._seats, self._doubted, self._count = {}, set(), asked.count
        seat = self._seats[asked.index] = _Seat(asked.incarnation, now)
        self._lose(f"seat {asked.index} is another process")
        self._doubted.discard(asked.index)
        self._tell(are_others=True)
        return seat

    def _lose(self, why: str) -> None:
        self.on_loss()
        if self._transfer is not None:
            self._finish(TRANSPORT, why)

    def _doubt(self) -> None:
        """Count no seat before it asks again; those that live do so at once."""
        self._doubted = set(self._seats)
        self._answer_all()
        self._tell()

    def _tell(self, *, are_others: bool = False) -> None:
        if self.num_seats != self._told or (are_others and self._told):
            self._told = self.num_seats
            self.on_change()

    def _finish(self, cause: str, message: str) -> None:
        assert self._transfer is not None, "there is a transfer to finish"
        transfer, self._transfer = self._transfer, None
        transfer.on_done(cause, message, transfer.num_bytes)
        if cause:
            self._doubt()
        self._answer_all()

    def _answer_all(self) -> None:
        for index, seat in self._seats.items():
            self._answer(index, seat)

    def _answer(self, index: int, seat: _Seat) -> None:
        """Answer the seat's poll, if it has one, with the order that holds."""
        request, seat.parked, seat.until = seat.parked, None, math.inf
        if request is not None:
            send_answer(request, Answer(self._order_of(index)))

    def _order_of(self, index: int) -> SeatOrder:
        if self._transfer is None:
            return SeatOrder()
        order, group = self._transfer.order, self._transfer.order.group
        return SeatOrder(
            round=order.round,
            number=order.number,
            membership=group.membership,
            rank=group.rank + index,
            world=group.world,
            num_sources=order.sources,
            store_host=group.store_host,
            store_port=group.store_port,
            secret=derive_name(self._secret, f"direct/{group.membership}"),
            deadline_s=order.deadline_s,
            live=tuple(sorted(order.live)),
            keep=self._transfer.keep,
            is_tagged=self._is_tagged,
            base=order.base,
        )
