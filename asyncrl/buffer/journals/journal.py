"""Journal protocol: the buffer's durable state.

Owns the order of durability: a payload is appended before the event that names it is committed, and
events are committed before any request is answered. There is one commit per turn of the
server loop, each all or none. The durable state is a snapshot of the ledger and the events after it.
Invariant: an acknowledged push survives `kill -9`; `fsync` decides the loss at a power cut.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgpack
import xxhash

from asyncrl.buffer.ledger.events import Event, pack, unpack
from asyncrl.core.errors import CheckpointError, WireError
from asyncrl.core.obstacle import Obstacle
from asyncrl.core.status.service import AnyJournalStatus
from asyncrl.core.wire import Frame

Fsync = Literal["everysec", "always", "never"]
EVENTS_PER_SNAPSHOT = 50_000
"""Replaying this many takes about half a second; a snapshot of 10,000 tickets takes 0.1 s to write."""


class Need(enum.Enum):
    """Request of a journal to its owner.

    NOTHING; a SNAPSHOT, because many events came since the last; or ALL: what it held is gone, so it
    wants the payloads that are still in memory and a snapshot of all that the ledger knows.
    """

    NOTHING = "nothing"
    SNAPSHOT = "snapshot"
    ALL = "all"


@dataclass(frozen=True)
class Recovery:
    """The past: a snapshot of the ledger, if there is one, and the events after it, in order."""

    snapshot: Mapping[str, object] | None
    events: Iterable[Event]


@dataclass(frozen=True, slots=True)
class Commit:
    """Events that the buffer committed at once.

    Attributes:
        number: From 1, without a gap.
        time_s: When, in seconds since the epoch; None in a journal of an older version.
    """

    number: int
    time_s: float | None
    events: list[Event]


class Journal(Protocol):
    """Durable memory of events and payloads. One thread."""

    counters: Counter[str]

    @property
    def need(self) -> Need: ...

    def recover(self) -> Recovery:
        """Return the committed past."""

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        """Write a payload; a `commit` that returns True makes it durable."""

    def holds(self, ticket: int, attempt: int) -> bool:
        """Tell whether this payload is there, without reading it."""

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        """Return a payload, None if it is not there or damaged."""

    def release(self, ticket: int) -> None:
        """Forget a payload."""

    def is_recent(self, ticket: int) -> bool:
        """Tell whether it costs no more than its own bytes to keep this payload."""

    def keep_only(self, tickets: Collection[int]) -> None:
        """Forget all payloads but these."""

    def commit(self, events: Sequence[Event], now: float) -> bool:
        """Take these events over; return whether they and all earlier ones are durable.

        False while the journal is away: call again, with what happened since.
        """

    def write_snapshot(self, values: Mapping[str, object]) -> None:
        """Remember the ledger as it stands after the last commit, which returned True."""

    def survey(self) -> bool:
        """Find out which payloads are still there, when ALL is needed; False while the journal is away."""

    def begin_anew(self, values: Mapping[str, object]) -> bool:
        """Replace the past by this ledger and the payloads appended since `survey`, when ALL is needed."""

    def wake_at(self) -> float:
        """Return when `tick`, or the `commit` that returned False, has something to do; infinite if never."""

    def listen(self, call: Callable[[], None]) -> None:
        """Have `call` made, on any thread, when `tick` has something to do before `wake_at`."""

    def tick(self, now: float) -> None:
        """Perform periodic work that is due."""

    def status(self) -> AnyJournalStatus:
        """Return the journal's status."""

    def obstacles(self) -> list[Obstacle]:
        """Return why it is away, while it is. Any thread may ask."""

    def close(self) -> None:
        """Make all durable and let go of files and connections."""


def pack_commit(events: Iterable[Event]) -> tuple[bytes, str]:
    """Return a commit's events as bytes, and their digest."""
    return _seal([pack(event) for event in events])


def unpack_commit(number: int, data: bytes, digest: str) -> list[Event]:
    """Return the events of commit `number`.

    Raises:
        CheckpointError: The stored events are damaged.
    """
    try:
        return [unpack(values) for values in _open(f"commit {number}", data, digest)]
    except WireError as error:
        raise _damaged(f"commit {number}", str(error)) from error


def pack_snapshot(values: Mapping[str, object]) -> tuple[bytes, str]:
    """Return a snapshot as bytes, and its digest."""
    return _seal(values)


def unpack_snapshot(data: bytes, digest: str) -> dict[str, object]:
    """Return a snapshot.

    Raises:
        CheckpointError: The stored snapshot is damaged.
    """
    values: dict[str, object] = _open("the snapshot", data, digest)
    return values


def _seal(values: object) -> tuple[bytes, str]:
    data: bytes = msgpack.packb(values)
    return data, xxhash.xxh3_64_hexdigest(data)


def _open(what: str, data: bytes, digest: str) -> Any:
    if xxhash.xxh3_64_hexdigest(data) != digest:
        raise _damaged(what, "its checksum does not fit")
    return msgpack.unpackb(data, strict_map_key=False)


def _damaged(what: str, why: str) -> CheckpointError:
    return CheckpointError(f"{what} of the journal is damaged: {why}", hint="Restore the journal")
