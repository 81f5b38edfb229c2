"""A journal on a simulated disk, which may lose what was not synced, and may be away.

Owns what outlives the buffer's process. Events and payloads of a process that was killed are all there; a
power cut leaves what was synced, some of the turns after it, and any of the payloads, torn ones being none.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from asyncrl.buffer.journals.journal import (
    Need,
    Recovery,
    pack_commit,
    pack_snapshot,
    unpack_commit,
    unpack_snapshot,
)
from asyncrl.buffer.ledger.events import Checkpointed, Event
from asyncrl.core.obstacle import Obstacle
from asyncrl.core.status.service import JournalStatus
from asyncrl.core.wire import Frame

SYNC_EVERY_S = 1.0


@dataclass
class Disk:
    """Turns, snapshots and payloads that a journal has written.

    Attributes:
        turns: (events, digest) of each. snapshots: (turns before it, values, digest).
        num_synced: Turns that a power cut leaves; `synced`: payloads.
        is_away: Nothing can be written.
    """

    turns: list[tuple[bytes, str]] = field(default_factory=list)
    snapshots: list[tuple[int, bytes, str]] = field(default_factory=list)
    payloads: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    num_synced: int = 0
    synced: set[tuple[int, int]] = field(default_factory=set)
    is_away: bool = False
    num_cut: int = 0

    def cut_power(self, dice: random.Random) -> int:
        """Lose what may be lost; return how many turns that is."""
        kept = dice.randint(self.num_synced, len(self.turns))
        lost = len(self.turns) - kept
        del self.turns[kept:]
        self.snapshots = [one for one in self.snapshots if one[0] <= kept]
        for key in sorted(set(self.payloads) - self.synced):
            if dice.random() < 0.5:
                del self.payloads[key]
        self.num_cut += lost
        return lost

    def damage(self, dice: random.Random) -> tuple[int, int] | None:
        """Flip a bit of one payload; it is found when it is read."""
        if not self.payloads:
            return None
        key = dice.choice(sorted(self.payloads))
        self.payloads[key] = []
        return key

    def events(self, after: int = 0) -> list[list[list[Any]]]:
        """Return the turns after the first `after` as plain values."""
        return [msgpack.unpackb(data) for data, _ in self.turns[after:]]


class SimulatedJournal:
    """See the module; it offers what `asyncrl.buffer.journals.journal.Journal` asks for."""

    def __init__(self, disk: Disk, is_always_synced: bool, events_per_snapshot: int = 1000) -> None:
        self.counters: Counter[str] = Counter()
        self._disk = disk
        self._is_always_synced = is_always_synced
        self._events_per_snapshot = events_per_snapshot
        self._index: dict[int, set[int]] = {}
        self._waiting: list[Event] = []
        self._num_new = 0
        self._next_sync = 0.0
        for ticket, attempt in disk.payloads:
            self._index.setdefault(ticket, set()).add(attempt)

    @property
    def need(self) -> Need:
        is_due = self._num_new >= self._events_per_snapshot and not self._waiting
        return Need.SNAPSHOT if is_due else Need.NOTHING

    def recover(self) -> Recovery:
        """Return the newest snapshot and the events after it."""
        after, values = 0, None
        if self._disk.snapshots:
            after, data, digest = self._disk.snapshots[-1]
            values = unpack_snapshot(data, digest)
        turns = self._disk.turns[after:]
        events = [
            event
            for number, (data, digest) in enumerate(turns)
            for event in unpack_commit(number, data, digest)
        ]
        self._num_new = len(events)
        return Recovery(values, events)

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        self._disk.payloads[ticket, attempt] = [bytes(frame) for frame in frames]
        self._disk.synced.discard((ticket, attempt))
        self._index.setdefault(ticket, set()).add(attempt)

    def holds(self, ticket: int, attempt: int) -> bool:
        return attempt in self._index.get(ticket, ())

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        if not self.holds(ticket, attempt):
            return None
        frames = self._disk.payloads[ticket, attempt]
        if not frames:  # damaged
            self.counters["damaged_payloads"] += 1
            self._index[ticket].discard(attempt)
            del self._disk.payloads[ticket, attempt]
            return None
        return list(frames)

    def release(self, ticket: int) -> None:
        for attempt in self._index.pop(ticket, ()):
            self._disk.payloads.pop((ticket, attempt), None)

    def is_recent(self, ticket: int) -> bool:
        return True

    def keep_only(self, tickets: Collection[int]) -> None:
        for ticket in [ticket for ticket in self._index if ticket not in tickets]:
            self.release(ticket)

    def commit(self, events: Sequence[Event], now: float) -> bool:
        self._waiting += events
        if self._disk.is_away:
            return False
        if self._waiting:
            self._disk.turns.append(pack_commit(self._waiting))
            self._num_new += len(self._waiting)
            has_checkpoint = any(isinstance(event, Checkpointed) for event in self._waiting)
            self._waiting = []
            if self._is_always_synced or has_checkpoint:
                self._sync()
        return True

    def write_snapshot(self, values: Mapping[str, Any]) -> None:
        data, digest = pack_snapshot(values)
        self._disk.snapshots = [*self._disk.snapshots[-1:], (len(self._disk.turns), data, digest)]
        self._num_new = 0

    def obstacles(self) -> list[Obstacle]:
        return []

    def survey(self) -> bool:
        return True

    def begin_anew(self, values: Mapping[str, Any]) -> bool:
        raise AssertionError("this journal never asks for it")

    def wake_at(self) -> float:
        return self._next_sync

    def listen(self, call: Callable[[], None]) -> None:
        pass

    def tick(self, now: float) -> None:
        if now >= self._next_sync and not self._disk.is_away:
            self._sync()
            self._next_sync = now + SYNC_EVERY_S

    def _sync(self) -> None:
        self._disk.num_synced = len(self._disk.turns)
        self._disk.synced = set(self._disk.payloads)

    def status(self) -> JournalStatus:
        return JournalStatus(is_away=self._disk.is_away)

    def close(self) -> None:
        pass
