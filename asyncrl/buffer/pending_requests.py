"""Requests that wait for the ledger to change.

Owns who waits, in the order of their coming, and until when. Requests of one *lane* are alike: what the
ledger refuses to the first of them it would refuse to all. A turn costs what it answers, not what waits.
Invariant: of those whose time is not over, who came first is tried first, across lanes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from asyncrl.buffer.messages import FETCH, FETCH_PARTIAL, LEASE, STATUS
from asyncrl.core.rpc import Request
from asyncrl.core.rpc.message import Message
from asyncrl.core.runtime.clock import Clock

R = TypeVar("R")
"""A request, as whoever parks it knows it."""
M = TypeVar("M")
"""An answer."""
Attempt = Callable[[], Message | None]
"""Returns the answer, or None to wait on; raises to refuse."""
Owner = tuple[str, str]
"""(role, name)."""
QUIET_OPS = frozenset(one.name for one in (LEASE, FETCH, FETCH_PARTIAL, STATUS))
"""Operations that never complete a pending request by themselves; their events do."""
MIN_KEPT = 64
"""Of those that have left, and hold memory until they are forgotten; beyond it as many as wait."""


def lease_lane(version: int, want: int) -> Hashable:
    """Return the lane of a call for leases: who serves the same version is granted the same, or nothing."""
    return ("lease", version, want > 0)


class RequestHandler(Protocol):
    """The turn-by-turn handling of requests, as operations see it.

    Attributes:
        is_paused: Whether an operator lets no group begin.
    """

    clock: Clock
    is_paused: bool

    def park_until(
        self,
        request: Request,
        attempt: Attempt,
        last: Callable[[], Message],
        wait_s: float,
        owner: Owner,
        lane: Hashable = None,
    ) -> None:
        """Answer now if possible, else when the ledger allows it, else after `wait_s`."""

    def end_waits(self, owner: Owner) -> None:
        """Answer all that an owner left parked."""


@dataclass(eq=False)
class PendingRequest(Generic[R, M]):
    """A request that waits.

    Attributes:
        last: Returns the answer when the wait is over.
        given_up: From when on nobody waits for the answer.
        owner: A newer client of the same owner takes its place.
        lane: Of those that are alike.
    """

    request: R
    attempt: Callable[[], M | None]
    last: Callable[[], M]
    deadline: float
    given_up: float
    owner: Owner
    lane: Hashable
    has_left: bool = field(default=False, init=False)


class PendingRequests(Generic[R, M]):
    """All that wait.

    >>> # lot.add(parked)
    >>> # lot.offer(lambda parked: answered(parked), are_alike=True)
    """

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[tuple[int, PendingRequest[R, M]]]] = {}
        self._deadlines: list[tuple[float, int, PendingRequest[R, M]]] = []
        self._of_owner: dict[Owner, list[PendingRequest[R, M]]] = {}
        self._numbers = itertools.count()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, parked: PendingRequest[R, M]) -> None:
        """Let a request wait from now on."""
        if len(self._deadlines) > MIN_KEPT + 2 * self._num_waiting:
            self._forget_left()
        number = next(self._numbers)
        self._lanes.setdefault(parked.lane, deque()).append((number, parked))
        heapq.heappush(self._deadlines, (parked.deadline, number, parked))
        self._of_owner.setdefault(parked.owner, []).append(parked)
        self._num_waiting += 1

    def of(self, owner: Owner) -> list[PendingRequest[R, M]]:
        """Return what an owner has waiting, oldest first."""
        return list(self._of_owner.get(owner, ()))

    @property
    def next_deadline(self) -> float:
        """Time at which the next wait may be over; infinite while nobody waits."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def remove(self, parked: PendingRequest[R, M]) -> None:
        """End a wait. Its places in lane and deadlines are cleared when they come up."""
        assert not parked.has_left, "a request leaves once"
        parked.has_left = True
        self._num_waiting -= 1
        others = self._of_owner[parked.owner]
        others.remove(parked)
        if not others:
            del self._of_owner[parked.owner]

    def take_expired(self, now: float) -> Iterator[PendingRequest[R, M]]:
        """Yield, and let go, those whose deadline has come."""
        while self._deadlines and self._deadlines[0][0] <= now:
            parked = heapq.heappop(self._deadlines)[2]
            if not parked.has_left:
                self.remove(parked)
                yield parked

    def end_turn(
        self,
        now: float,
        answers: Callable[[PendingRequest[R, M]], bool],
        end: Callable[[PendingRequest[R, M]], None],
        *,
        has_changed: bool,
        are_alike: Callable[[], bool],
    ) -> None:
        """Let those whose time is over try once more and `end`, and all the others if something has changed.

        Args:
            answers, are_alike: As of `offer`.
        """
        for parked in self.take_expired(now):
            if not answers(parked):
                end(parked)
        if has_changed and self._num_waiting:
            self.offer(answers, are_alike=are_alike())

    def offer(self, answers: Callable[[PendingRequest[R, M]], bool], *, are_alike: bool) -> None:
        """Let everyone try, oldest first; who is answered leaves.

        Args:
            answers: Returns whether it could answer.
            are_alike: A lane whose first cannot be answered is not asked further.
        """
        # No two have the same number, so lanes are never compared.
        heads = [(line[0][0], lane) for lane in list(self._lanes) if (line := self._clear(lane))]
        heapq.heapify(heads)
        kept: dict[Hashable, list[tuple[int, PendingRequest[R, M]]]] = {}
        while heads:
            _, lane = heapq.heappop(heads)
            entry = self._lanes[lane].popleft()
            if answers(entry[1]):
                self.remove(entry[1])
            else:
                kept.setdefault(lane, []).append(entry)
                if are_alike:
                    continue
            if line := self._clear(lane):
                heapq.heappush(heads, (line[0][0], lane))
        for lane, entries in kept.items():
            self._lanes.setdefault(lane, deque()).extendleft(reversed(entries))

    def _forget_left(self) -> None:
        """Let go of all that have left; so seldom that each costs the same however many wait."""
        self._deadlines = [entry for entry in self._deadlines if not entry[2].has_left]
        heapq.heapify(self._deadlines)
        for lane, line in list(self._lanes.items()):
            self._lanes[lane] = deque(entry for entry in line if not entry[1].has_left)
            self._clear(lane)

    def _clear(self, lane: Hashable) -> deque[tuple[int, PendingRequest[R, M]]]:
        """Drop from the front of a lane those that have left, and an empty lane; return the lane."""
        line = self._lanes.get(lane, deque())
        while line and line[0][1].has_left:
            line.popleft()
        if not line:
            self._lanes.pop(lane, None)
        return line
