"""Seat of a process in direct transfers: asks its service's desk for orders, and carries them out.

The polling thread
  consumes: orders    waits for: another order than the one it knows
  unblocked by: the desk, at latest when its wait ends    produces: transfers, aborts
The thread of a transfer
  consumes: its order, packs    waits for: the other members, until the order's deadline
  unblocked by: the same, an abort    produces: the end of the round, told to the desk until it took it
A desk that is away is asked again after a pause: to its successor this seat is what it was to itself.
Invariant: a round is carried out once at most, and only while it is the order.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from asyncrl.core.rpc.client import Client
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.sockets.keys import ClientKeys
from weight_sync.backends.contract import DigestMismatch
from weight_sync.direct.carrier import Carrier
from weight_sync.direct.orders import ASK_ORDER, SEAT_ENDED, AskOrder, SeatEnded, SeatOrder
from weight_sync.direct.party import PackStore as PackStore
from weight_sync.direct.party import Party as Party
from weight_sync.direct.party import Superseded
from weight_sync.protocol.messages import MAX_TEXT
from weight_sync.protocol.rounds import DIGEST, SUPERSEDED, TRANSPORT

log = logging.getLogger(__name__)

IDLE_WAIT_S, BUSY_WAIT_S = 1.0, 0.5
"""For which a poll is parked: without a transfer, and to tell how far one is."""
ANSWER_S = 5.0
AWAY_PAUSE_S = 0.5


@dataclass(frozen=True)
class DeskAddress:
    """RPC address of the service whose desk a seat asks, and the keys of its socket."""

    address: str
    keys: ClientKeys | None = None


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A transfer under way, or over; given up once it is no longer the desk's order."""

    order: SeatOrder
    until: float
    carrier: Carrier
    is_given_up: Event
    has_ended: Event


class Seat:
    """See the module.

    >>> # seat = Seat(runtime, DeskAddress(address, keys), rank, world_size, snapshots)
    >>> # seat.start() ... seat.close()

    Args:
        index: Of this seat, of `count` of the same service.
        party: What is sent from here, or received.
    """

    def __init__(self, runtime: Runtime, desk: DeskAddress, index: int, count: int, party: Party) -> None:
        self._runtime, self._desk, self._party = runtime, desk, party
        self._index, self._count, self._incarnation = index, count, runtime.new_id()
        self._stop = runtime.event()
        self._carriers: dict[int, Carrier] = {}
        self._transfer: _Transfer | None = None

    def start(self) -> None:
        """Begin to ask for orders."""
        self._runtime.spawn("seat", partial(self._poll, self._connect()))

    def close(self) -> None:
        """Give up what goes on, and ask no more; waits for nothing."""
        self._stop.set()
        self._give_up(self._transfer)

    def _connect(self) -> Client:
        return Client(self._runtime, self._desk.address, self._desk.keys)

    def _poll(self, asking: Client) -> None:
        with closing(asking) as desk:
            while not self._stop.is_set():
                try:
                    self._follow(self._ask(desk))
                except Exception as error:  # its service is away; of any kind, such as no descriptor left
                    log.info("no order for direct transfers: %s", error)
                    self._stop.wait(AWAY_PAUSE_S)

    def _ask(self, desk: Client) -> SeatOrder:
        transfer, round_id, num_steps, wait_s = self._transfer, 0, 0, IDLE_WAIT_S
        if transfer is not None:
            round_id, num_steps = transfer.order.round, transfer.carrier.num_steps
            wait_s = IDLE_WAIT_S if transfer.has_ended.is_set() else BUSY_WAIT_S
        asked = AskOrder(
            index=self._index,
            count=self._count,
            incarnation=self._incarnation,
            round=round_id,
            num_steps=num_steps,
            wait_s=wait_s,
        )
        return desk.ask(ASK_ORDER, asked, deadline_s=wait_s + ANSWER_S).message

    def _follow(self, order: SeatOrder) -> None:
        """Begin the order's transfer, unless it is the one that was begun already."""
        transfer = self._transfer
        if order.round == (transfer.order.round if transfer is not None else 0):
            return
        self._give_up(transfer)
        self._transfer = self._begin(order) if order.round else None
        if self._stop.is_set():
            self._give_up(self._transfer)

    def _begin(self, order: SeatOrder) -> _Transfer:
        for membership in set(self._carriers) - {order.membership, *order.live}:
            self._carriers.pop(membership).close()
        carrier = self._carriers.get(order.membership)
        if carrier is None:
            carrier = self._carriers[order.membership] = Carrier(self._runtime, self._party, order.secret)
        carrier.num_steps = 0  # here: the next poll tells it
        until = self._runtime.now() + order.deadline_s
        transfer = _Transfer(order, until, carrier, self._runtime.event(), self._runtime.event())
        self._runtime.spawn(f"direct-{order.round}", partial(self._carry, transfer, self._connect()))
        return transfer

    def _give_up(self, transfer: _Transfer | None) -> None:
        if transfer is not None:
            transfer.is_given_up.set()
            if not transfer.has_ended.is_set():
                transfer.carrier.abort()

    def _carry(self, transfer: _Transfer, telling: Client) -> None:
        order, cause, message, num_bytes = transfer.order, "", "", 0
        with closing(telling) as desk:
            try:
                self._party.keep(order.keep)
                num_bytes = transfer.carrier.run(order, transfer.until)
            except DigestMismatch as error:
                cause, message = DIGEST, str(error)
            except Superseded as error:
                cause, message = SUPERSEDED, str(error)
            except Exception as error:  # of any kind: the desk must hear of its end
                cause, message = TRANSPORT, f"{type(error).__name__}: {error}"
            transfer.has_ended.set()
            ended = SeatEnded(
                index=self._index,
                count=self._count,
                incarnation=self._incarnation,
                round=order.round,
                cause=cause,
                message=message[:MAX_TEXT],
                num_bytes=num_bytes,
            )
            self._tell(desk, transfer, ended)
        if cause == SUPERSEDED:
            transfer.carrier.abort()  # the others wait for it: see `Carrier.run`

    def _tell(self, desk: Client, transfer: _Transfer, ended: SeatEnded) -> None:
        """Tell the desk until it has taken it, or has another order."""
        if ended.cause:
            log.warning("direct transfer of version %d: %s", transfer.order.number, ended.message)
        while not transfer.is_given_up.is_set():
            try:
                desk.ask(SEAT_ENDED, ended, deadline_s=ANSWER_S)
                return
            except Exception:  # as above
                transfer.is_given_up.wait(AWAY_PAUSE_S)
