"""Placement of groups on replicas whose KV caches share prefixes: a ticket for the one that asks (pure).

Prompts of one source begin alike (a system prompt, tool schemas): a replica that has computed that beginning
at its version finds it in its cache. KV pressure needs no rule here: a replica without room does not ask.
Invariants: a ticket is passed over by fewer than `WINDOW` younger ones; who asks is given something whenever
there is something, so that nobody waits for a better place.

    share      a call is given at most its share of a step: those that wait get theirs
    choose     of the oldest tickets, one whose beginning the replica has, else one that nobody has yet
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

WINDOW = 16
"""Tickets that are looked at, fewer where a step has fewer groups."""


class Placed(StrEnum):
    """Placed for which a replica was given a ticket.

    HIT: it has the beginning. NEW: no replica has it. COPY: only others have it. ORDER: there was no choice.
    """

    HIT = "hit"
    NEW = "new"
    COPY = "copy"
    ORDER = "order"


class Placement:
    """The replicas that ask, and the beginnings in their caches at the newest version.

    Args:
        silence_s: A replica that neither asks nor renews for so long is forgotten.

    Attributes:
        counts: Tickets placed, by reason.

    >>> placement = Placement(10.0)
    >>> placement.note("a", 1, source=0)
    >>> placement.choose("b", 1, sources=[0, 1])
    (1, <Placed.NEW: 'new'>)
    >>> placement.choose("a", 1, sources=[1, 0])
    (1, <Placed.HIT: 'hit'>)
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._seen: dict[str, float] = {}  # by when they last asked or renewed, the most silent first
        self._version = 0
        self._holders: dict[int, set[str]] = {}
        self.counts: Counter[Placed] = Counter()

    def see(self, replica: str, now: float, *, asks: bool = True) -> None:
        """Take note that a replica is there, if it has ever asked; forget those silent for too long."""
        if not (asks or replica in self._seen):
            return
        self._seen.pop(replica, None)
        self._seen[replica] = now
        while now - self._seen[silent := next(iter(self._seen))] >= self._silence_s:
            self.forget(silent)

    def forget(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        self._seen.pop(replica, None)
        for holders in self._holders.values():
            holders.discard(replica)

    def share(self, groups_per_step: int) -> int:
        """Return the most groups of one lease call: the replica's share of a step."""
        return -(-groups_per_step // max(1, len(self._seen)))

    def place(self, replica: str, version: int, sources: Sequence[int]) -> int:
        """Return the place in `sources`, those of the oldest tickets, of the one that it is given."""
        place, reason = self.choose(replica, version, sources)
        self.counts[reason] += 1
        self.note(replica, version, sources[place])
        return place

    def choose(self, replica: str, version: int, sources: Sequence[int]) -> tuple[int, Placed]:
        """Return the place in `sources`, those of the oldest tickets, of the one to grant, and the reason."""
        if len(sources) == 1 or version < self._version:
            return 0, Placed.ORDER
        holders = self._holders if version == self._version else {}
        fresh: int | None = None
        for place, source in enumerate(sources):
            found = holders.get(source)
            if found and replica in found:
                return place, Placed.HIT
            if not found and fresh is None:
                fresh = place
        return (0, Placed.COPY) if fresh is None else (fresh, Placed.NEW)

    def note(self, replica: str, version: int, source: int) -> None:
        """Take note that a replica which serves `version` computes a prompt of `source`."""
        if version > self._version:
            self._version, self._holders = version, {}
        if version == self._version:
            self._holders.setdefault(source, set()).add(replica)
