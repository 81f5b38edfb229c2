"""Circuit breaker of data sources: one whose groups fail by infrastructure gets no leases for a while (pure).

    closed -> open: of its last `WINDOW_GROUPS` groups, at least `MIN_FAILED` and half failed so
    open -> probe: after a pause one group is leased, one at a time
    probe -> closed: any group of it came in       probe -> open: it failed so again; the pause doubles

Owns which source may be leased now. Nothing of it is journalled: after a restart every source is tried.
Invariant: an open source is always probed again, so that no state of it lasts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from asyncrl.buffer.ledger.facts import Facts
from asyncrl.buffer.ledger.tickets import State, Ticket
from asyncrl.core.obstacle import Cause, Obstacle

WINDOW_GROUPS, MIN_FAILED, OPEN_SHARE = 16, 6, 0.5
FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 300.0
Attempt = tuple[int, int]
"""(ticket, attempt)."""


@dataclass
class _Source:
    """`pause_s`: 0 while closed. `probed_from`: the time of the next probe. `failed`: of its last groups."""

    failed: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW_GROUPS))
    reason: str = ""
    pause_s: float = 0.0
    probed_from: float = -math.inf
    probe: Attempt | None = None

    def open(self, now: float) -> None:
        self.pause_s = min(2 * self.pause_s or FIRST_PAUSE_S, MAX_PAUSE_S)
        self.probed_from, self.probe = now + self.pause_s, None


class SourceBreaker:
    """See the module.

    Args:
        state: Returns the ledger's facts.

    Attributes:
        names: Of the sources, for messages; where there is none, its number.
    """

    def __init__(self, state: Callable[[], Facts]) -> None:
        self._state = state
        self._open: dict[int, _Source] = {}
        self._closed: dict[int, _Source] = {}
        self.names: tuple[str, ...] = ()

    @property
    def num_sources(self) -> int:
        """Number of the data sources."""
        return max(1, len(self._state().sources))

    def is_open(self, source: int) -> bool:
        """Whether a source gets no lease but for probes."""
        return source in self._open

    def may_lease(self, source: int, now: float) -> bool:
        """Tell whether a group of this source may be leased now."""
        found = self._open.get(source)
        if found is None:
            return True
        return now >= found.probed_from and not (found.probe and self._is_leased(found.probe))

    def may_lease_any(self, now: float) -> bool:
        """Tell whether any source may be leased now."""
        return any(self.may_lease(source, now) for source in range(self.num_sources))

    def next_issued(self, now: float, kept: Collection[int] = ()) -> Ticket | None:
        """Return the oldest issued ticket, but for those `kept`, of a source that may be leased."""
        heap, tickets = self._state().issued_heap, self._state().tickets
        in_order = sorted(heap) if self._open or kept else heap[:1]
        found = (tickets[number] for number in in_order if number not in kept)
        return next((one for one in found if self.may_lease(one.source, now)), None)

    def held(self) -> list[int]:
        """Return the issued tickets that wait for their source, oldest first."""
        if not self._open:
            return []
        state = self._state()
        return [number for number in sorted(state.issued_heap) if self.is_open(state.tickets[number].source)]

    def _is_leased(self, attempt: Attempt) -> bool:
        found = self._state().tickets.get(attempt[0])
        return found is not None and found.state is State.LEASED and found.attempt == attempt[1]

    def note_lease(self, source: int, attempt: Attempt) -> None:
        """Take the lease of an open source as its probe."""
        if (found := self._open.get(source)) is not None:
            found.probe = attempt

    def succeed(self, source: int) -> None:
        """Count a group that came in; an open source is closed."""
        if (found := self._open.pop(source, None)) is not None:
            self._closed[source] = _Source()
        elif (found := self._closed.get(source)) is not None:
            found.failed.append(False)

    def fail(self, source: int, attempt: Attempt, reason: str, now: float) -> None:
        """Count a group that failed by infrastructure; open the source after too many."""
        if (found := self._open.get(source)) is not None:
            found.reason = reason
            if attempt == found.probe:  # the others were leased before it opened
                found.open(now)
            return
        found = self._closed.setdefault(source, _Source())
        found.failed.append(True)
        found.reason = reason
        if sum(found.failed) >= max(MIN_FAILED, OPEN_SHARE * len(found.failed)):
            self._open[source] = self._closed.pop(source)
            found.open(now)

    def next_probe(self, since: float) -> float:
        """Return the first time after `since` at which a source may be probed; infinite without one."""
        return min(
            (one.probed_from for one in self._open.copy().values() if one.probed_from > since),
            default=math.inf,
        )

    def obstacles(self) -> list[Obstacle]:
        """Return what the status tells: advice while other sources go on, a full stop without one."""
        paused = sorted(self._open.copy().items())
        if not paused:
            return []
        told = "; ".join(f"{self._name(source)}, tried every {one.pause_s:g} s" for source, one in paused)
        cause = Cause.SOURCES_PAUSED if len(paused) >= self.num_sources else Cause.SOURCE_PAUSED
        failed = sum(paused[0][1].failed)
        why = f"{failed} of its last {len(paused[0][1].failed)} groups failed by infrastructure"
        return [Obstacle("", cause, f"no leases for {told}: {why}: {paused[0][1].reason}")]

    def _name(self, source: int) -> str:
        named = f" ({self.names[source]})" if source < len(self.names) else ""
        return f"data source {source + 1}{named}"
