"""Lease rules of a replica: which calls it makes, for how many groups, and what it gives back (pure).

Owns no group, no clock and no connection: `rollout_service.replica` and the planner's replica own theirs and
ask here. Must never be written a second time.
Invariants: a call that says what the replica holds is the only one out, so no grant is on its way that it
leaves out; a replica that is not READY, is fenced or stands by asks for nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.core.states import ServiceState

Attempt = tuple[int, int]
"""(ticket, attempt)."""

LEASE_WAIT_S = 2.0
"""Time that a lease call may wait at the buffer."""
RETRY_PAUSE_S = 0.5
"""From an error to the next try."""
CALL_ATTEMPTS = 6
INTERRUPT_DEADLINE_S = 5.0
FAREWELL_DEADLINE_S = 2.0


def count_max_groups(max_sequences: int, num_samples: int) -> int:
    """Return how many groups fit with all of their samples: a few wait inside the engine, so that its batch
    stays full.

    >>> count_max_groups(max_sequences=64, num_samples=8)
    10
    """
    full = max(1, max_sequences // num_samples)
    return full + max(1, full // 4)


def count_free_groups(limit: int, num_samples: int, num_unfinished: int) -> int:
    """Return how many groups fit beside `num_unfinished` samples, if `limit` of them may be unfinished.

    What counts is unfinished samples: a straggler holds its own place in the engine's batch, and not those of
    its group. With log-normal lengths that is 1.7 times the tokens (docs/benchmarks.md).

    >>> count_free_groups(limit=80, num_samples=8, num_unfinished=60)
    2
    """
    return max(0, limit - num_unfinished) // num_samples


def may_lease(state: str, *, is_fenced: bool, is_standby: bool) -> bool:
    """Tell whether a replica may ask for leases and evaluations.

    Args:
        state: A `ServiceState`.
    """
    return state == ServiceState.READY and not (is_fenced or is_standby)


@dataclass(frozen=True)
class LeaseCall:
    """One call of `lease`.

    Attributes:
        held: All attempts that the replica works on, if grants may have been lost with an earlier answer.
    """

    number: int
    version: int
    want: int
    held: tuple[Attempt, ...] | None
    wait_s: float = LEASE_WAIT_S


class Leasing:
    """The lease calls of one replica.

    A call that lies at the buffer under an older version stays out: its grants are good, only fewer.

    >>> leasing = Leasing()
    >>> call = leasing.next_call(version=1, want=4, held=())
    >>> print(leasing.next_call(version=1, want=3, held=()))
    None
    >>> leasing.end(call, is_answered=True)
    >>> leasing.next_call(version=1, want=3, held=()).want
    3
    """

    def __init__(self) -> None:
        self._last: LeaseCall | None = None
        self._out: set[int] = set()
        self._may_miss_grants = False
        self._is_telling = False  # a call that says what the replica holds is out

    def next_call(
        self, version: int, want: int, held: Collection[Attempt], *, asks_when_full: bool = False
    ) -> LeaseCall | None:
        """Return the call to make now, None if none is due; ask anew whenever anything has changed.

        Args:
            version: The served one. want: How many groups there is room for.
            held: The attempts that the replica works on.
            asks_when_full: Ask with `want` 0 as well, for an evaluation.
        """
        if (want <= 0 and not asks_when_full) or self._is_telling:
            return None
        last = self._last
        if last is not None and last.number in self._out and not _is_news(last, version, want):
            return None
        says_held = self._may_miss_grants and not self._out
        number = last.number + 1 if last is not None else 1
        self._last = LeaseCall(number, version, want, tuple(held) if says_held else None)
        self._is_telling = says_held
        self._out.add(number)
        return self._last

    def end(self, call: LeaseCall, *, is_answered: bool) -> None:
        """Note the end of a call; of one without an answer after `RETRY_PAUSE_S`.

        The next call after one without an answer says what the replica holds, so that the rest goes back.
        """
        self._out.remove(call.number)
        self._is_telling = False
        if not is_answered:
            self._may_miss_grants = True
        elif call.held is not None:
            self._may_miss_grants = False


def _is_news(last: LeaseCall, version: int, want: int) -> bool:
    return version != last.version or (want > 0 and last.want == 0)


class HeldOrder:
    """The evaluation order that a replica is at work on, as it tells the buffer with every lease call."""

    def __init__(self) -> None:
        self.number: int | None = None

    def take(self, number: int) -> bool:
        """Note an order that came with a lease; tell whether it is another one than the replica has."""
        is_new, self.number = number != self.number, number
        return is_new

    def end(self, number: int, *, has_more: bool) -> None:
        """Note that a part was reported, and whether another one has come with the answer."""
        if not has_more and self.number == number:
            self.number = None

    def forget(self) -> None:
        """Give the order up; a later lease may bring it again."""
        self.number = None


def is_order_good(asked_version: int, served_version: int) -> bool:
    """Tell whether an order that was asked for under a version holds for the served one; else ask again."""
    return asked_version == served_version


def renewal_interval_s(lease_s: float) -> float:
    """Return the time between two renewals. One with no groups is the heartbeat of an evaluation."""
    return lease_s / 3


class Tries:
    """The tries at one call that may be repeated.

    >>> tries = Tries()
    >>> [tries.may_repeat() for _ in range(CALL_ATTEMPTS)]
    [True, True, True, True, True, False]
    """

    def __init__(self) -> None:
        self._num_left = CALL_ATTEMPTS

    def may_repeat(self) -> bool:
        """Count a try that had no answer; tell whether another one follows, after `RETRY_PAUSE_S`."""
        self._num_left -= 1
        return self._num_left > 0


class DrainStage(StrEnum):
    """Stage of a drain while groups are in flight.

    FINISH: they may end by themselves. INTERRUPT: they are interrupted, and their tokens so far handed in.
    """

    FINISH = "FINISH"
    INTERRUPT = "INTERRUPT"


def plan_drain(grace_s: float, *, resumes_partial: bool) -> tuple[tuple[DrainStage, float], ...]:
    """Return the stages of a drain and how long each may take; one without a group in flight is left out.

    After them the replica releases the leases of all attempts that it still holds, and deregisters.
    """
    stages = []
    if grace_s:
        stages.append((DrainStage.FINISH, grace_s))
    if resumes_partial:
        stages.append((DrainStage.INTERRUPT, INTERRUPT_DEADLINE_S))
    return tuple(stages)
