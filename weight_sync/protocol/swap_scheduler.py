"""Swap scheduler: decides which members may load a verified version now (pure).

Owns the queue of members that hold a verified copy. A permit is held from the commit to the report of
the load, at most `deadline_s`.
Invariant: at no moment do more than `max_loads` members hold a permit.
"""

from __future__ import annotations

import heapq
import math

from asyncrl.core.staleness import UNLOADED
from weight_sync.protocol.members import Member, MemberState
from weight_sync.protocol.messages import Commit, Withdraw
from weight_sync.protocol.rounds import Lane
from weight_sync.protocol.state import CoordinationState
from weight_sync.sync_records import LoadFailureRecord

MAX_LOAD_FAILURES = 3
LOAD = "load"
"""Cause of a failed round whose bytes all arrived: an engine did not load its version."""


def max_loads(parallelism: int, max_unavailable: float | None, num_members: int) -> int:
    """Return how many of `num_members` may load at once; one at least, or no version would be served.

    >>> [max_loads(8, share, 20) for share in (None, 1.0, 0.25, 0.01)]
    [8, 8, 5, 1]
    """
    if max_unavailable is None:
        return parallelism
    return min(parallelism, max(1, int(max_unavailable * num_members)))


class SwapScheduler:
    """See the module."""

    def __init__(self, state: CoordinationState) -> None:
        self._state = state
        self._queue: dict[str, int] = {}  # the number of each member's turn
        self._num_turns = 0
        self._turns: list[tuple[bool, int, str]] = []  # a heap, some of which do not hold any more
        self._known_turns: set[tuple[bool, int, str]] = set()
        self._deadlines: list[tuple[float, str]] = []  # a heap, likewise
        self._refused_number = UNLOADED

    def ask(self, member: Member, number: int) -> None:
        """The member holds the verified version `number`."""
        member.staged = number
        if member.name not in self._queue:
            self._requeue(member)

    def forget(self, name: str) -> None:
        """Another process has taken the member's name."""
        self._queue.pop(name, None)
        self._state.permits.discard(name)

    def look(self, member: Member) -> None:
        """Note that something may have changed about the member: it may take its turn only now."""
        if member.name not in self._queue or not member.may_swap():
            return
        turn = (member.serving != UNLOADED, self._queue[member.name], member.name)
        if turn not in self._known_turns:
            self._known_turns.add(turn)
            heapq.heappush(self._turns, turn)

    def put_off(self) -> None:
        """The deadlines of the members have changed."""
        members = self._state.members
        self._deadlines = sorted((members[name].swap_until, name) for name in self._state.permits)

    def take_back(self, member: Member) -> None:
        """The member will not take up its commit; it waits for another one, behind the others."""
        if member.swapping is not None:
            member.staged = max(member.swapping, member.staged or 0)
            member.swapping = None
            self._state.permits.discard(member.name)
            self._requeue(member)

    def note_load(self, member: Member, number: int, now: float) -> None:
        """The member's engine has loaded `number`."""
        if member.swapping is not None and number >= member.swapping:
            member.swapping, member.last_swap_s = None, now - member.swap_began
            self._state.permits.discard(member.name)
        member.serving, member.num_load_failures = number, 0
        if member.staged is not None and member.staged <= number:
            member.staged = None
        self._state.counters["swaps"] += 1
        member.hear_replica(is_attended=False)

    def note_failed_load(self, member: Member, number: int, error: str, now: float) -> None:
        """The engine could not load `number` and holds nothing usable; it loads again from staging."""
        self._state.counters["failed_loads"] += 1
        if number != self._refused_number:
            self._refused_number = number
            self._state.counters["rounds_failed"] += 1
            self._state.counters[f"rounds_failed/{LOAD}"] += 1
        self._state.note(LoadFailureRecord(member.name, number, error))
        member.swapping, member.last_error = None, error
        member.serving = member.direct_base = UNLOADED
        self._state.permits.discard(member.name)
        member.is_unheard = False
        member.num_load_failures += 1
        if member.num_load_failures >= MAX_LOAD_FAILURES:
            member.num_load_failures, member.staged = 0, None
            self._state.blame(member, f"load failed {MAX_LOAD_FAILURES} times: {error}")
            self._state.back_off(member, now)
        else:
            member.staged = max(number, member.staged or 0)
            self._requeue(member)
        if member.state in (MemberState.SYNCING, MemberState.READY, MemberState.PINNED):
            member.move(MemberState.SYNCING)

    def due_at(self) -> float:
        """Return when `check_deadlines` has something to do; infinite while no member swaps."""
        deadlines = self._deadlines
        while deadlines and not self._holds(*deadlines[0]):
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else math.inf

    def _holds(self, until: float, name: str) -> bool:
        """Tell whether it is still the deadline of a permit."""
        return name in self._state.permits and self._state.members[name].swap_until == until

    def check_deadlines(self, now: float) -> None:
        """Take back permits that were held for too long, and blame their holders."""
        if now < self.due_at():
            return
        members = self._state.members
        for member in self._state.in_order(
            {name for name in self._state.permits if now >= members[name].swap_until}
        ):
            self._state.counters["missed_swaps"] += 1
            self.take_back(member)
            member.is_attended = False
            self._state.order(member.name, Withdraw())
            self._state.blame(member, "swap not done in time")

    def grant(self, now: float) -> None:
        """Commit to the next members; those that serve nothing first, for they generate nothing."""
        while self._turns and len(self._state.permits) < self._limit:
            turn = heapq.heappop(self._turns)
            self._known_turns.remove(turn)
            serves, number, name = turn
            member = self._state.members[name]
            is_now = self._queue.get(name) == number and serves == (member.serving != UNLOADED)
            if is_now and member.may_swap():
                self._commit(member, now)

    @property
    def _limit(self) -> int:
        """Members that may hold a permit now."""
        share, members = self._state.max_unavailable, self._state.members.values()
        num_members = 0 if share is None else sum(member.is_listening for member in members)
        return max_loads(self._state.parallelism, share, num_members)

    def _commit(self, member: Member, now: float) -> None:
        assert member.staged is not None, "only a verified version is waited with"
        del self._queue[member.name]
        member.swapping, member.staged = member.staged, None
        member.swap_began, member.swap_until = now, now + self._state.deadlines(Lane.MAIN).deadline_s
        self._state.permits.add(member.name)
        heapq.heappush(self._deadlines, (member.swap_until, member.name))
        self._state.order(member.name, Commit(member.swapping))

    def _requeue(self, member: Member) -> None:
        self._num_turns += 1
        self._queue[member.name] = self._num_turns
        self.look(member)
