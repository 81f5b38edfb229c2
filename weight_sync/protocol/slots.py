"""Slots of a publisher: the versions that must stay, and the one that may be overwritten (pure).

Owns which slot is current, which was sent last and which are in transfer; holds no bytes: `memory.pool` keeps
the segments, the planner none. Invariant: a slot that is current (late joiners need it), in transfer, or the
base of differences is never given away; with no other left, the learner's publish is deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from asyncrl.core.staleness import UNLOADED

NUM_SLOTS = 3
"""With so many, a publish is deferred only if two old transfers hang."""


class Slot(Protocol):
    """A place for one version.

    Attributes:
        num_transfers: Transfers that read it. number: Of its version; 0 while it is empty or being written.
    """

    is_writing: bool
    num_transfers: int

    @property
    def number(self) -> int: ...


S = TypeVar("S", bound=Slot)


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
        # The oldest: one that was just replaced may still be asked for.
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
