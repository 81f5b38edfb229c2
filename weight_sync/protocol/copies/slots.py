"""Versions that a publisher and a receiver keep: the slots of the one, the copies of the other (pure).

Owns which version is where; holds no bytes: `memory.pool` and `memory.staging` keep the segments, the planner
none. Invariants: a slot that is current (late joiners need it), in transfer, or the base of differences is
never given away; with no other left, the learner's publish is deferred. Of copies the newest wins: a newer
verified or committed one replaces an older one that was not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from asyncrl.core.staleness import UNLOADED

NUM_SLOTS = 3
"""With so many, a publish is deferred only if two old transfers hang."""


class Numbered(Protocol):
    """A place or a copy of one version; its `number` is 0 while it is empty or being written."""

    @property
    def number(self) -> int: ...


class Slot(Numbered, Protocol):
    """A place for one version.

    Attributes:
        num_transfers: Transfers that read it.
    """

    is_writing: bool
    num_transfers: int


S = TypeVar("S", bound=Slot)
C = TypeVar("C", bound=Numbered)


class Slots(Generic[S]):
    """The slots of one publisher.

    Args:
        slots: At least 2.
        keeps_sent: Keep the newest version that was sent, for differences to it.
    """

    def __init__(self, slots: Sequence[S], *, keeps_sent: bool = False) -> None:
        assert len(slots) >= 2, "one slot is always current"
        self._slots = list(slots)
        self._keeps_sent = keeps_sent
        self.current: S | None = None
        self.sent: S | None = None

    def next_to_write(self) -> S | None:
        """Return the slot that is being written, else a free one, None if all are in use."""
        return next((slot for slot in self._slots if slot.is_writing), None) or self._free_slot()

    def _free_slot(self) -> S | None:
        # The oldest: a recently replaced version may still be requested.
        return min(self._unused(), key=lambda slot: slot.number, default=None)

    def _unused(self) -> list[S]:
        kept = (self.current, self.sent)
        return [slot for slot in self._slots if slot not in kept and not slot.num_transfers]

    def hold(self, number: int) -> S | None:
        """Return the slot of version `number` and keep it as it is until `release`."""
        for slot in self._slots:
            if slot.number == number and number != UNLOADED:
                slot.num_transfers += 1
                return slot
        return None

    def release(self, slot: S) -> None:
        """One transfer of the slot has ended."""
        assert slot.num_transfers > 0, "released more often than held"
        slot.num_transfers -= 1

    def note_sent(self, slot: S) -> None:
        """The slot's version has reached receivers: the next one may be sent as a difference to it."""
        if self._keeps_sent and (self.sent is None or slot.number > self.sent.number):
            self.sent = slot

    def describe(self) -> list[str]:
        """Return one word per slot, for the status."""
        return [self._state_of(slot) for slot in self._slots]

    def _state_of(self, slot: S) -> str:
        if slot.num_transfers:
            return "in transfer"
        if slot is self.current:
            return "current"
        return "writing" if slot.is_writing else "free"


class Copies(Generic[C]):
    """The copies of one receiver.

    Args:
        give_back: Called with a copy that has no place any more.
    """

    def __init__(self, give_back: Callable[[C], None]) -> None:
        self._give_back = give_back
        self._verified: C | None = None
        self._committed: C | None = None
        self._taken: C | None = None

    @property
    def newest_verified(self) -> int:
        """Newest version number that is here, verified and not taken; 0 for none."""
        return max((copy.number for copy in (self._verified, self._committed) if copy), default=UNLOADED)

    @property
    def committed_number(self) -> int:
        """The version number that the engine may take next; 0 for none."""
        return self._committed.number if self._committed else UNLOADED

    @property
    def taken(self) -> C | None:
        """The copy that the engine is loading."""
        return self._taken

    @property
    def taken_number(self) -> int:
        """The version number that the engine is loading; 0 for none."""
        return self._taken.number if self._taken else UNLOADED

    def has(self, copy: C | None) -> bool:
        """Tell whether a copy has a place."""
        return copy in (self._verified, self._committed, self._taken)

    def put_verified(self, copy: C) -> None:
        """Keep a verified copy until its commit."""
        older, self._verified = self._verified, copy
        self._let_go(older)

    def commit(self, number: int) -> None:
        """Let the engine have version `number`, or the newer one that has replaced it."""
        if self._verified is not None and self._verified.number >= number:
            self.commit_verified()

    def commit_verified(self) -> bool:
        """Let the engine have the verified copy, if there is one."""
        if self._verified is None:
            return False
        self._let_go(self._committed)
        self._committed, self._verified = self._verified, None
        return True

    def withdraw(self) -> None:
        """Take back a committed copy that was not taken; it waits for another commit."""
        older, self._committed = self._committed, None
        self._put_back(older, has_newer=self._verified is not None)

    def take(self, serving: int) -> C | None:
        """Return the copy that an engine serving `serving` should load; the same one if asked again.

        What it serves already, or what is older, makes room.
        """
        if self._taken is not None and self._taken.number <= serving:
            self.finish_load(self._taken.number, is_ok=True)
        if self._committed is not None and self._committed.number <= serving:
            older, self._committed = self._committed, None
            self._let_go(older)
        if self._taken is None:
            self._taken, self._committed = self._committed, None
        return self._taken

    def release_copies(self) -> None:
        """The engine that had taken a copy is gone; another one may have it."""
        older, self._taken = self._taken, None
        self._put_back(older, has_newer=self._verified is not None or self._committed is not None)

    def drop(self, is_lost: Callable[[C], bool]) -> list[C]:
        """Forget the copies that are lost, and return them."""
        places = (self._verified, self._committed, self._taken)
        lost = [copy for copy in places if copy is not None and is_lost(copy)]
        self._verified, self._committed, self._taken = (None if copy in lost else copy for copy in places)
        for copy in lost:
            self._give_back(copy)
        return lost

    def finish_load(self, number: int, is_ok: bool) -> None:
        """The engine has loaded version `number`, or failed and must load again."""
        if self._taken is None or self._taken.number != number:
            return
        if not is_ok:
            self.release_copies()
            return
        older, self._taken = self._taken, None
        self._let_go(older)

    def _put_back(self, copy: C | None, *, has_newer: bool) -> None:
        if copy is not None and not has_newer:
            self._verified = copy
        else:
            self._let_go(copy)

    def _let_go(self, copy: C | None) -> None:
        if copy is not None:
            self._give_back(copy)
