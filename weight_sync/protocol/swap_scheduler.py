"""Swap scheduler: decides which members may load a verified version now (pure).

Owns the queue of members that hold a verified copy. A permit is held from the commit to the report of
the load, at most `deadline_s`.
Invariant: at no moment do more than `parallelism` members hold a permit.
"""

from __future__ import annotations

import math

from asyncrl.core.staleness import UNLOADED
from weight_sync.protocol.members import Member, MemberState
from weight_sync.protocol.messages import Commit, Withdraw
from weight_sync.protocol.state import CoordinationState
from weight_sync.sync_records import LoadFailureRecord

MAX_LOAD_FAILURES = 3
LOAD = "load"
"""Cause of a failed round whose bytes all arrived: an engine did not load its version."""


class SwapScheduler:
    """See the module."""

    def __init__(self, state: CoordinationState) -> None:
        self._state = state
        self._queue: dict[str, None] = {}  # an ordered set
        self._refused_number = UNLOADED

    def ask(self, member: Member, number: int) -> None:
        """The member holds the verified version `number`."""
        member.staged = number
        self._queue.setdefault(member.name)

    def forget(self, name: str) -> None:
        """Another process has taken the member's name."""
        self._queue.pop(name, None)

    def take_back(self, member: Member) -> None:
        """The member will not take up its commit; it waits for another one, behind the others."""
        if member.swapping is not None:
            member.staged = max(member.swapping, member.staged or 0)
            member.swapping = None
            self._requeue(member)

    def note_load(self, member: Member, number: int, now: float) -> None:
        """The member's engine has loaded `number`."""
        if member.swapping is not None and number >= member.swapping:
            member.swapping, member.last_swap_s = None, now - member.swap_began
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
        member.swapping, member.serving, member.last_error = None, UNLOADED, error
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
        swapping = (one.swap_until for one in self._state.members.values() if one.swapping is not None)
        return min(swapping, default=math.inf)

    def check_deadlines(self, now: float) -> None:
        """Take back permits that were held for too long, and blame their holders."""
        for member in self._state.members.values():
            if member.swapping is not None and now >= member.swap_until:
                self._state.counters["missed_swaps"] += 1
                self.take_back(member)
                member.is_attended = False
                self._state.order(member.name, Withdraw())
                self._state.blame(member, "swap not done in time")

    def grant(self, now: float) -> None:
        """Commit to the next members; those that serve nothing first, for they generate nothing."""
        if not self._queue:
            return
        members = self._state.members
        num_swapping = sum(member.swapping is not None for member in members.values())
        waiting = [members[name] for name in self._queue if members[name].may_swap()]
        for member in sorted(waiting, key=lambda member: member.serving != UNLOADED):
            if num_swapping >= self._state.parallelism:
                return
            del self._queue[member.name]
            assert member.staged is not None, "only a verified version is waited with"
            member.swapping, member.staged = member.staged, None
            member.swap_began, member.swap_until = now, now + self._state.deadlines.deadline_s
            self._state.order(member.name, Commit(member.swapping))
            num_swapping += 1

    def _requeue(self, member: Member) -> None:
        self._queue.pop(member.name, None)
        self._queue[member.name] = None
