"""The coordinator's picture of one member (pure).

A member is a receiver, beside one engine. Its states and the allowed moves are one table.
Invariant: there is no way from DEAD to READY but through SYNCING; RETIRED has no way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from asyncrl.versions import UNLOADED


class MemberState(StrEnum):
    """SYNCING has no usable weights yet; SUSPECT missed a deadline; DRAINING gets nothing new."""

    SYNCING = "SYNCING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    DRAINING = "DRAINING"
    RETIRED = "RETIRED"
    DEAD = "DEAD"


_ALIVE_ENDS = frozenset({MemberState.DRAINING, MemberState.RETIRED, MemberState.DEAD})
ALLOWED: dict[MemberState, frozenset[MemberState]] = {
    MemberState.SYNCING: _ALIVE_ENDS | {MemberState.READY, MemberState.SUSPECT},
    MemberState.READY: _ALIVE_ENDS | {MemberState.SYNCING, MemberState.SUSPECT},
    MemberState.SUSPECT: _ALIVE_ENDS | {MemberState.SYNCING, MemberState.READY},
    MemberState.DRAINING: frozenset({MemberState.RETIRED, MemberState.DEAD}),
    MemberState.RETIRED: frozenset(),
    MemberState.DEAD: frozenset({MemberState.SYNCING}),
}


@dataclass(frozen=True)
class Card:
    """What a receiver says of itself in its hello; 0 stands for no version."""

    name: str
    incarnation: str
    abilities: frozenset[str]
    serving: int = UNLOADED
    staged: int = UNLOADED
    is_attended: bool = False
    is_pinned: bool = False


@dataclass
class PublisherSeat:
    """The publisher as the coordinator knows it."""

    incarnation: str
    abilities: frozenset[str]
    store_host: str
    store_port: int
    last_seen: float


@dataclass
class Member:
    """One receiver.

    Attributes:
        incarnation: Unique per process; another one is another receiver under the same name.
        serving: Version number that the engine has loaded.
        fenced_until: Missed a deadline; its replica may take no leases before it serves this number.
        is_pinned: Held at its version for evaluation: no offers, no commits.
        is_attended: A replica has asked for weights, so a commit will be taken up.
        staging: Version number in transfer to it.
        staged: Verified version number that waits for its turn to swap.
        swapping: Version number that the engine was told to load.
        is_alone: Its last transfer failed for no known reason; the next one is tried without others.
        retry_at: No offers before this time.
    """

    name: str
    incarnation: str
    abilities: frozenset[str]
    last_seen: float
    serving: int = UNLOADED
    state: MemberState = MemberState.SYNCING
    fenced_until: int | None = None
    is_pinned: bool = False
    is_attended: bool = False
    staging: int | None = None
    staged: int | None = None
    swapping: int | None = None
    swap_until: float = 0.0
    is_alone: bool = False
    retry_at: float = 0.0
    num_failures: int = 0
    num_load_failures: int = 0
    last_round_s: float | None = None
    last_error: str = ""

    def move(self, state: MemberState) -> None:
        """Change the state; a move that the table does not have is a bug of the caller."""
        if state == self.state:
            return
        assert state in ALLOWED[self.state], f"{self.name}: no way from {self.state} to {state}"
        self.state = state

    @property
    def is_fenced(self) -> bool:
        return self.fenced_until is not None

    @property
    def is_listening(self) -> bool:
        """Whether orders to it make sense."""
        return self.state not in (MemberState.RETIRED, MemberState.DEAD)

    @property
    def has_free_slot(self) -> bool:
        """Whether a receiver with two staging segments has one free (see `receiver.py`)."""
        return self.staging is None and (self.staged is None or self.swapping is None)

    @property
    def newest(self) -> int:
        """The newest version number that it has or is getting."""
        return max(self.serving, self.staging or 0, self.staged or 0, self.swapping or 0)

    def may_be_offered(self, number: int, now: float) -> bool:
        """Tell whether a round with version `number` may include it."""
        return (
            self.state in (MemberState.SYNCING, MemberState.READY)
            and not self.is_pinned
            and self.has_free_slot
            and self.newest < number
            and now >= self.retry_at
        )

    def may_swap(self) -> bool:
        """Tell whether it holds a verified version that its engine could load now."""
        is_live = self.state in (MemberState.SYNCING, MemberState.READY)
        wants_to = self.staged is not None and self.swapping is None
        return is_live and wants_to and self.is_attended and not self.is_pinned

    def fence(self, newest_number: int) -> None:
        """Take its leases away until it serves `newest_number`, the newest when it failed."""
        self.fenced_until = newest_number
        if self.state in (MemberState.SYNCING, MemberState.READY):
            self.move(MemberState.SUSPECT)

    def catch_up(self) -> None:
        """It was heard from or has loaded: lift the fence and the suspicion if they no longer hold."""
        if self.fenced_until is not None and self.serving >= self.fenced_until:
            self.fenced_until = None
        if self.state in (MemberState.SYNCING, MemberState.READY, MemberState.SUSPECT):
            is_usable = self.serving != UNLOADED and self.fenced_until is None
            self.move(MemberState.READY if is_usable else MemberState.SYNCING)
