"""Messages between a service and the processes that carry out its direct transfers: its seats (pure).

The publisher's seats are the learner's ranks, a receiver's those of its engine's workers. A seat polls; the
answer is the order that holds now, so one that was lost or came twice changes nothing.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.core.rpc.message import MAX_NAME_CHARACTERS, Done, Message, Operation, Wait
from weight_sync.protocol.messages import MAX_SEATS, MAX_TEXT

Number = Annotated[int, Meta(ge=0)]


class OfSeat(Message, frozen=True, kw_only=True):
    """A request of seat `index` of `count`; `incarnation` is unique per process."""

    index: Annotated[int, Meta(ge=0, lt=MAX_SEATS)]
    count: Annotated[int, Meta(ge=1, le=MAX_SEATS)]
    incarnation: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]


class AskOrder(OfSeat, frozen=True, kw_only=True):
    """Asks for the order; answered at once if it is not of round `round`, else when it changes.

    Attributes:
        round: Of the order that the seat knows; 0 for none.
        num_steps: Packs of that round that it is done with.
    """

    round: Number = 0
    num_steps: Number = 0
    wait_s: Wait


class SeatOrder(Message, frozen=True, kw_only=True):
    """A transfer, as one seat is to carry it out. Round 0: none, and what still runs is to be given up.

    Attributes:
        number: Of the version. membership: Of the group, as in `backends.contract.Group`.
        rank, world: Of the seat in the group, whose first `num_sources` ranks are the learner's.
        secret: Of the members of this group.
        live: Memberships that may stay open.
        keep: Versions that the engine may still load: all others that a worker holds can go.
        is_tagged: Packs carry tags, as the run's sockets have keys.
        base: As in `protocol.messages.Transfer`.
    """

    round: int = 0
    number: int = 0
    membership: int = 0
    rank: int = 0
    world: int = 0
    num_sources: int = 0
    store_host: str = ""
    store_port: int = 0
    secret: str = ""
    deadline_s: float = 0.0
    live: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    is_tagged: bool = False
    base: int = 0

    def __repr__(self) -> str:
        """Name the order without its secret."""
        return f"SeatOrder(round={self.round}, number={self.number}, rank={self.rank} of {self.world})"


class SeatEnded(OfSeat, frozen=True, kw_only=True):
    """The seat is done with a round; without a `cause` all of its packs were sent, or are here and right."""

    round: Number
    cause: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    message: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    num_bytes: Number = 0


ASK_ORDER = Operation("ask_order", AskOrder, SeatOrder)
SEAT_ENDED = Operation("seat_ended", SeatEnded, Done)
