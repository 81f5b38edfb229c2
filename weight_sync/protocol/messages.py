"""Messages between the coordinator and its peers: requests, events, orders, answers (pure).

Peers are the publisher and the receivers. Events and orders travel as their name and their fields;
`read_event` and `read_order` check both where they arrive. A version's manifest travels as a frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from asyncrl.core.errors import WireError
from asyncrl.core.rpc.message import AskStatus, Message, Operation, read_message
from asyncrl.core.staleness import UNLOADED
from asyncrl.core.status.service import NUM_INDICES, CoordinatorStatus

MAX_SEATS = 1 << 16
MAX_STRIPES = 1 << 12
MAX_TEXT = 200
"""Characters of a name or an address; further ones of a reason are cut."""
_INDEX = rf"0|[1-9][0-9]{{0,{len(str(NUM_INDICES)) - 2}}}"
_PUBLISHER = rf"publisher(\.({_INDEX}))?"
PeerName = Annotated[str, Meta(pattern=rf"\A({_PUBLISHER}|receiver\.({_INDEX}))\Z")]
"""Publishers (`lanes.stripes`) and receivers are numbered, so that what is kept of them is bounded."""
PublisherName = Annotated[str, Meta(pattern=rf"\A{_PUBLISHER}\Z")]
ReceiverName = Annotated[str, Meta(pattern=rf"\Areceiver\.({_INDEX})\Z")]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Seats = Annotated[int, Meta(ge=0, le=MAX_SEATS)]
StripeIndex = Annotated[int, Meta(ge=0, lt=MAX_STRIPES)]


class OfPeer(Message, frozen=True, kw_only=True):
    """A request of a peer; `token` is that of the newest coordinator it has heard."""

    name: PeerName
    incarnation: Text
    token: int = 0


class Hello(OfPeer, frozen=True, kw_only=True):
    """Introduction of a peer.

    Attributes:
        started_ms: Start of its process, in milliseconds of the wall clock; an older one is refused while a
            newer one lives under the same name.
        seq: Number of the hello; one that is read behind a later one says nothing. 0 for none.
        told: Number of the last report that it was written after; None from who does not count.
    """

    started_ms: int = 0
    seq: int = 0
    told: int | None = None


class ReceiverHello(Hello, frozen=True, kw_only=True):
    """Introduction of a receiver, with what it holds; 0 stands for no version.

    Attributes:
        attended: A replica has asked it for weights. pinned: It is held at its version for an evaluation.
        base: Version number whose bytes it keeps, verified, so that a difference to it can be sent;
            `direct_base`: whose bytes the workers of its engine keep.
        by_folder: It reads the folder, and is in no group.
        node: Mark of the shared memory that it sees; empty if it can share none.
        shared: Version number that others of its node may map, under the name `shared_path`.
        seats: Workers of its engine that can take part in direct rounds; 0 unless all can.
    """

    name: ReceiverName
    serving: int
    staged: int
    attended: bool
    pinned: bool
    draining: bool = False
    base: int = UNLOADED
    direct_base: int = UNLOADED
    by_folder: bool = False
    node: Text = ""
    shared: int = UNLOADED
    shared_path: Text = ""
    seats: Seats = 0


class PublisherHello(Hello, frozen=True, kw_only=True):
    """Introduction of the publisher, with the address at which receivers meet it.

    Attributes:
        folder: Its place in `weight_sync.folder`; empty without one.
        node: As of a receiver. path: Name under which its newest version may be mapped there.
        seats: Ranks of the learner that can take part in direct rounds; 0 unless all can.
        stripe, num_stripes: Its stripe of each version, see `lanes.stripes`.
    """

    name: PublisherName
    store_host: Text
    store_port: int
    folder: Text = ""
    node: Text = ""
    path: Text = ""
    seats: Seats = 0
    stripe: StripeIndex = 0
    num_stripes: Annotated[int, Meta(ge=1, le=MAX_STRIPES)] = 1


class HelloReply(Message, frozen=True):
    """Answer to a hello: `poll_s` is how long a poll is parked, `outdated` asks for another hello."""

    token: int
    poll_s: float
    accepted: bool
    outdated: bool = False


class NextOrder(OfPeer, frozen=True, kw_only=True):
    """Asks for orders behind number `after`, which acknowledges those up to it."""

    after: int


class NumberedOrder(Message, frozen=True):
    """An order: its number, name and fields, and which of the frames is its manifest, -1 for none."""

    seq: int
    kind: str
    fields: Mapping[str, object]
    frame: int = -1


class Orders(Message, frozen=True):
    """Orders to a peer; one that is not known must say hello first."""

    token: int
    known: bool
    orders: tuple[NumberedOrder, ...] = ()
    fenced: bool = False


class Report(OfPeer, frozen=True, kw_only=True):
    """Something happened at the peer; `seq` numbers its reports, 0 for none."""

    event: str
    fields: Mapping[str, object]
    seq: int = 0


class Reported(Message, frozen=True):
    """Whether the coordinator knows the peer, and took the report."""

    token: int
    known: bool


HELLO = Operation("hello", ReceiverHello, HelloReply)
PUBLISHER_HELLO = Operation("publisher_hello", PublisherHello, HelloReply)
NEXT_ORDER = Operation("next_order", NextOrder, Orders)
REPORT = Operation("report", Report, Reported)
STATUS = Operation("status", AskStatus, CoordinatorStatus)


class Event(Message, frozen=True):
    """Event at a peer, reported under the name `kind`."""

    kind: ClassVar[str]


class Goodbye(Event, frozen=True):
    """The peer ends."""

    kind = "goodbye"


class SeatsChanged(Event, frozen=True):
    """So many processes of the peer can take part in direct rounds; other ones than before, perhaps."""

    kind = "seats"
    seats: Seats


class Published(Event, frozen=True):
    """The publisher has a new version; its manifest is the frame, `path` as in its hello."""

    kind = "published"
    path: Text = ""


class Sent(Event, frozen=True):
    """The publisher has sent all buckets of a round: so many bytes."""

    kind = "sent"
    round: int
    num_bytes: int


class SendFailed(Event, frozen=True):
    """The publisher did not send all; it had begun `begun_s` ago, infinity for never."""

    kind = "send_failed"
    round: int
    cause: str
    begun_s: float = math.inf


class Attended(Event, frozen=True):
    """A replica asks the receiver for weights."""

    kind = "attended"


class Pinned(Event, frozen=True):
    """The replica stays at its version."""

    kind = "pin"


class Unpinned(Event, frozen=True):
    """The replica follows again."""

    kind = "unpin"


class Draining(Event, frozen=True):
    """The replica takes no more versions."""

    kind = "drain"


class Restarted(Event, frozen=True):
    """The replica's engine was started anew, and serves this number."""

    kind = "restarted"
    serving: int


class LoadEnded(Event, frozen=True):
    """The engine serves version `number`, or could not load it."""

    kind = "loaded"
    number: int
    ok: bool
    error: str


class Progress(Event, frozen=True):
    """The receiver goes on with a round: so many pieces of memory and buckets are done."""

    kind = "progress"
    round: int
    num_steps: int


class Lost(Event, frozen=True):
    """The engine has lost version `number`, which it held itself: it needs it once more."""

    kind = "lost"
    number: int


class Accepted(Event, frozen=True):
    """The receiver has room for the version of a round."""

    kind = "accepted"
    round: int


class Verified(Event, frozen=True):
    """All bytes of a round are there, and right; others of the node may map the version as `path`.

    Attributes:
        is_complete: All stripes of the version are.
    """

    kind = "verified"
    round: int
    number: int
    path: Text = ""
    is_complete: bool = True


class Failed(Event, frozen=True):
    """The receiver does not get the version of a round; so many buckets had come."""

    kind = "failed"
    round: int
    cause: str
    num_buckets: int = 0


OF_PUBLISHER: Mapping[str, type[Event]] = {
    one.kind: one for one in (Goodbye, Published, Sent, SendFailed, SeatsChanged)
}
OF_RECEIVER: Mapping[str, type[Event]] = {
    one.kind: one
    for one in (
        Goodbye,
        Attended,
        Pinned,
        Unpinned,
        Draining,
        Restarted,
        LoadEnded,
        Progress,
        Accepted,
        Verified,
        Failed,
        SeatsChanged,
        Lost,
    )
}


def read_event(name: str, report: Report, kinds: Mapping[str, type[Event]]) -> Event:
    """Return the event in the report of `name`.

    Raises:
        WireError: It is none of `kinds`, or has other fields.
    """
    if report.event not in kinds:
        raise WireError(f"{name} reports '{report.event[:MAX_TEXT]}', which is unknown here")
    return read_message(report.fields, kinds[report.event], report.event)


class Instruction(Message, frozen=True):
    """Order to a peer, sent under the name `kind`."""

    kind: ClassVar[str]


class Offer(Instruction, frozen=True):
    """Make room for a version: its manifest is the frame.

    Attributes:
        direct: The engine's workers are to hold it.
        stripe, num_stripes: What the round brings of it, see `lanes.stripes`.
    """

    kind = "offer"
    round: int
    number: int
    direct: bool = False
    stripe: StripeIndex = 0
    num_stripes: Annotated[int, Meta(ge=1, le=MAX_STRIPES)] = 1


class Transfer(Instruction, frozen=True):
    """Send or receive a version.

    Attributes:
        membership, rank, world, store_host, store_port, folder: Of the group, see `backends.contract.Group`.
        live: Numbers of the groups that may stay open.
        base: The version number that every receiver of the round holds, so that differences to it may be
            sent; 0 if whole buckets are to be.
        afresh: Its receiver could not use what is stored: store it again.
        sources: Ranks of the learner, the first of the group; the others are the engines' workers, from
            `rank` on those of the receiver. 0 unless they are to carry it out themselves.
    """

    kind = "transfer"
    round: int
    number: int
    membership: int
    rank: int
    world: int
    store_host: str
    store_port: int
    live: tuple[int, ...]
    deadline_s: float
    base: int = UNLOADED
    folder: Text = ""
    afresh: bool = False
    sources: Seats = 0


class MapCopy(Instruction, frozen=True):
    """Map a version that a process of the node shares as `path`, and check it: its manifest is the frame."""

    kind = "map"
    round: int
    number: int
    path: str


class Abort(Instruction, frozen=True):
    """Give a round up."""

    kind = "abort"
    round: int


class Close(Instruction, frozen=True):
    """A round through the folder is over: what was stored for it alone may go."""

    kind = "close"
    round: int


class Commit(Instruction, frozen=True):
    """Let the replica load this version."""

    kind = "commit"
    number: int


class Withdraw(Instruction, frozen=True):
    """Take back what was committed; the replica must speak before it counts."""

    kind = "withdraw"


INSTRUCTIONS: Mapping[str, type[Instruction]] = {
    one.kind: one for one in (Offer, Transfer, MapCopy, Abort, Close, Commit, Withdraw)
}


def read_instruction(kind: str, fields: Mapping[str, object]) -> Instruction:
    """Return what an order of this name tells to do.

    Raises:
        WireError: There is no such order, or it has other fields.
    """
    if kind not in INSTRUCTIONS:
        raise WireError(f"an order '{kind[:MAX_TEXT]}' is unknown here")
    return read_message(fields, INSTRUCTIONS[kind], kind)
