"""Messages of the publisher and of a receiver: a struct per request and answer (pure).

The learner publishes through the first, a replica follows versions through the second. A version's manifest
travels as the one frame beside these.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.core.rpc.message import MAX_NAME_CHARACTERS, AskStatus, Done, Message, Operation, Wait
from asyncrl.core.status.service import PublisherStatus, ReceiverStatus

MAX_ERROR_CHARACTERS = 500
"""Of an error of an engine, as much as is kept."""
Bytes = Annotated[int, Meta(ge=0)]
Incarnation = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]


# --- the publisher ----------------------------------------------------------------------------------


class OfLearner(Message, frozen=True):
    """A request of the learner that holds this fencing token; an older one is refused."""

    token: int


class Open(OfLearner, frozen=True):
    """Makes this learner the one that publishes."""


class Acquire(OfLearner, frozen=True):
    """Asks for a free segment of so many bytes; 0: of any size, for a first version."""

    num_bytes: Bytes


class Acquired(Message, frozen=True):
    """The path of the segment, empty if there is none."""

    path: str


class AwaitRoom(OfLearner, frozen=True):
    """Is answered once an `acquire` may find a segment, or a newer one of these has come."""


class Commit(OfLearner, frozen=True):
    """Makes what was written to the segment the newest version; its manifest is the frame."""

    path: str


class AskCurrent(Message, frozen=True):
    """Asks for the newest version that the publisher has."""


class Current(Message, frozen=True):
    """Its number, 0 for none."""

    number: int


OPEN = Operation("open", Open, Done)
ACQUIRE = Operation("acquire", Acquire, Acquired)
AWAIT_ROOM = Operation("await_room", AwaitRoom, Done)
COMMIT = Operation("commit", Commit, Done)
CURRENT = Operation("current", AskCurrent, Current)
PUBLISHER_STATUS = Operation("status", AskStatus, PublisherStatus)


# --- a receiver -------------------------------------------------------------------------------------


class OfReplica(Message, frozen=True, kw_only=True):
    """A request of the replica beside the receiver.

    Attributes:
        incarnation: Unique per process of the replica.
        started_ns: When it was given its work, by the host's clock.
        seq: Number of the call, of those that may come late: one behind a newer one is not believed.
    """

    incarnation: Incarnation = ""
    started_ns: int = 0
    seq: int | None = None


class NextStaged(OfReplica, frozen=True):
    """Asks for the next version to load, while the engine serves number `serving` (0: none)."""

    serving: int
    wait_s: Wait


class Loaded(OfReplica, frozen=True):
    """Version `number` is loaded and served, or the engine holds nothing usable."""

    number: int
    ok: bool
    error: str


class Pin(OfReplica, frozen=True):
    """Holds the replica at its version: nothing is offered or handed over."""


class Unpin(OfReplica, frozen=True):
    """Lets it follow again."""


class Drain(OfReplica, frozen=True):
    """The replica takes no more versions."""


class Handed(Message, frozen=True):
    """Answer of a receiver to its replica.

    Attributes:
        path: Of a verified copy to load, whose manifest is the frame; empty without one, or where the
            engine's workers hold it themselves.
        fenced: The replica missed a deadline, and may take no leases before it has caught up.
        past: Another process has taken the replica's place.
    """

    path: str = ""
    fenced: bool = False
    past: bool = False


NEXT_STAGED = Operation("next_staged", NextStaged, Handed)
LOADED = Operation("loaded", Loaded, Handed)
PIN = Operation("pin", Pin, Handed)
UNPIN = Operation("unpin", Unpin, Handed)
DRAIN = Operation("drain", Drain, Handed)
RECEIVER_STATUS = Operation("status", AskStatus, ReceiverStatus)
