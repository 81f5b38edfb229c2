"""Payloads of a run in a hash of Redis: those that are there, to be written, and to be deleted.

Invariant: a payload stays in memory until Redis has said that it holds it; one that a broken link carried is
sent again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from asyncrl.buffer.journals.payload_index import PayloadIndex
from asyncrl.buffer.journals.records import make_record
from asyncrl.buffer.journals.redis.link import Argument, RedisLink, Refusal
from asyncrl.core.runtime.faults import fault_point, is_wanted
from asyncrl.core.wire import Frame

DELETE_EVERY_S = 0.05


class RedisPayloads:
    """See the module.

    Args:
        key: Of the hash.

    Attributes:
        index: Of the payloads that are in the hash, or will be.
        deletions: Names in the hash that the next transaction removes.
        delete_at: Time at which that is due, in the runtime's seconds.
        refusal: Last error of Redis about a payload that it refused.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._unwritten: dict[str, bytes] = {}
        self._sent: set[str] = set()
        self.index = PayloadIndex()
        self.deletions: list[str] = []
        self.delete_at = -math.inf
        self.refusal = ""

    @property
    def are_written(self) -> bool:
        """Whether Redis holds every payload."""
        return not self._unwritten

    def begin(self, names: Iterable[bytes]) -> None:
        """Start from the hash's contents, and forget pending writes."""
        self._unwritten.clear()
        self.index = PayloadIndex(names)
        self.deletions = self.index.take_outdated()

    def add(self, ticket: int, attempt: int, rank: int, frames: Sequence[Frame]) -> str:
        """Keep a payload that is to be written; return its name in the hash."""
        name = self.index.add(ticket, attempt, rank)
        self.deletions.extend(self.index.take_outdated())
        if name in self.deletions:
            self.deletions.remove(name)
        self._unwritten[name] = make_record(ticket, attempt, frames)
        self._sent.discard(name)
        return name

    def send(self, link: RedisLink, name: str, ticket: int | None = None) -> None:
        """Send a payload ahead: its answer is read with others."""
        record = self._unwritten[name]
        command: tuple[Argument, ...] = ("HSET", self._key, name, record)

        def on_reply(reply: object) -> None:
            self._sent.discard(name)
            if isinstance(reply, Refusal):
                self.refusal = str(reply)
            elif self._unwritten.get(name) is record:
                del self._unwritten[name]

        if is_wanted("buffer.appending", ticket):
            link.send_half([command])
            fault_point("buffer.appending", ticket)
        self._sent.add(name)
        link.send(*command, on_reply=on_reply)

    def send_rest(self, link: RedisLink) -> None:
        """Send every payload that is neither written nor under way."""
        for name in [name for name in self._unwritten if name not in self._sent]:
            self.send(link, name)

    def forget_sent(self) -> None:
        """Forget which payloads were sent, so that a new link sends the pending ones again."""
        self._sent.clear()

    def unwritten(self, name: str) -> bytes | None:
        """Return the record of a payload that Redis may not hold yet."""
        return self._unwritten.get(name)

    def delete(self, names: Sequence[str], now: float) -> None:
        """Have payloads removed, together with others that are released soon after."""
        self.delete_at = self.delete_at if self.deletions else now + DELETE_EVERY_S
        for name in names:
            self._unwritten.pop(name, None)
        self.deletions.extend(names)
