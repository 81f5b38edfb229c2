"""State of one member at the coordinator (pure).

A member is a receiver, beside one engine. Its states and the allowed moves are one table.
Invariant: there is no way from DEAD to READY but through SYNCING, and no one leaves SYNCING before its
replica has spoken; RETIRED has no way out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.core.staleness import UNLOADED, PolicyVersion
from weight_sync.protocol.lanes.stripes import WHOLE, Stripe
from weight_sync.protocol.messages import ReceiverHello
from weight_sync.protocol.rounds import Lane, Round


class MemberState(StrEnum):
    """STARTING: no replica has asked for weights yet. SYNCING has no usable weights, SUSPECT missed a
    deadline, DRAINING gets nothing new, PINNED stays at its version for an evaluation."""

    STARTING = "STARTING"
    SYNCING = "SYNCING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    PINNED = "PINNED"
    DRAINING = "DRAINING"
    RETIRED = "RETIRED"
    DEAD = "DEAD"


_ENDS = frozenset({MemberState.DRAINING, MemberState.RETIRED, MemberState.DEAD})
ALLOWED: dict[MemberState, frozenset[MemberState]] = {
    MemberState.STARTING: _ENDS | {MemberState.SYNCING},
    MemberState.SYNCING: _ENDS | {MemberState.READY, MemberState.SUSPECT},
    MemberState.READY: _ENDS | {MemberState.SYNCING, MemberState.SUSPECT, MemberState.PINNED},
    MemberState.SUSPECT: _ENDS | {MemberState.SYNCING, MemberState.READY},
    MemberState.PINNED: _ENDS | {MemberState.READY, MemberState.SYNCING, MemberState.SUSPECT},
    MemberState.DRAINING: frozenset({MemberState.RETIRED, MemberState.DEAD}),
    MemberState.RETIRED: frozenset(),
    MemberState.DEAD: frozenset({MemberState.SYNCING}),
}
_STARTED = frozenset({MemberState.SYNCING, MemberState.READY, MemberState.SUSPECT, MemberState.PINNED})
_OFFERABLE = (MemberState.STARTING, MemberState.SYNCING, MemberState.READY)
MAX_LONE_ROUNDS = MAX_STAGED_VERSIONS = 32


@dataclass
class PublisherInfo:
    """A publisher as the coordinator knows it.

    Attributes:
        is_missed: It was blamed for its silence and has not been heard since.
        started_ms: As in `Hello`.
        folder, node, path, seats: As in `PublisherHello`.
        stripe: Of each version that it sends.
        newest: The version that it can send.
        num_unanswered: Aborts in a row that it has not answered.
    """

    incarnation: str
    store_host: str
    store_port: int
    last_seen: float
    is_missed: bool = False
    started_ms: int = 0
    folder: str = ""
    node: str = ""
    path: str = ""
    seats: int = 0
    stripe: Stripe = WHOLE
    newest: PolicyVersion | None = None
    num_unanswered: int = 0


@dataclass(eq=False)  # of a thousand one is looked for among others
class Member:
    """One receiver.

    Attributes:
        incarnation: Unique per process; another one is another receiver under the same name.
        serving: Version number that the engine has loaded.
        fenced_until: Missed a deadline; its replica may take no leases before it serves this number.
        is_pinned: Held at its version for evaluation: no offers, no commits.
        is_attended: A replica has asked for weights, so a commit will be performed.
        is_unheard: It was DEAD and its replica has not reported since: the hello's statements about the
            replica are not trusted.
        base, direct_base, by_folder, node, shared, shared_path, seats: As in `ReceiverHello`.
        staged_until: Newest version number that it gets staged, as the direct path has failed;
            `num_direct_failures` in a row.
        not_mapped: By incarnation of a process of its node, the newest version number that it could not map
            from that; infinite if it can map none.
        mapped_from: Process whose copy its newest version is; empty if that is its own.
        staging: Version number in transfer to it.
        staged: Verified version number that waits for its turn to swap.
        swapping: Version number that the engine was told to load.
        lone_rounds_left: Transfers broke or were late for no better known reason than it: so many that
            work it is served without others, who would wait for it.
        num_buckets: Buckets received in the transfer that failed last.
        retry_at: No offers before this time.
        rank: Its place among the members, by their first hellos.
    """

    name: str
    incarnation: str
    last_seen: float
    serving: int = UNLOADED
    state: MemberState = MemberState.STARTING
    fenced_until: int | None = None
    is_pinned: bool = False
    is_attended: bool = False
    is_unheard: bool = False
    started_ms: int = 0
    base: int = UNLOADED
    direct_base: int = UNLOADED
    by_folder: bool = False
    node: str = ""
    shared: int = UNLOADED
    shared_path: str = ""
    seats: int = 0
    staged_until: int = UNLOADED
    num_direct_failures: int = 0
    not_mapped: dict[str, float] = field(default_factory=dict)
    mapped_from: str = ""
    staging: int | None = None
    staged: int | None = None
    swapping: int | None = None
    swap_began: float = 0.0
    swap_until: float = 0.0
    lone_rounds_left: int = 0
    num_parted: int = 0
    num_buckets: int = 0
    retry_at: float = 0.0
    num_failures: int = 0
    num_load_failures: int = 0
    last_round_s: float | None = None
    last_swap_s: float | None = None
    last_error: str = ""
    rank: int = 0

    def is_usurped(self, info: ReceiverHello, *, is_silent: bool) -> bool:
        """Tell whether a hello is to be refused: the member has retired, or a newer process lives."""
        if self.incarnation == info.incarnation:
            return self.state is MemberState.RETIRED
        return self.is_listening and not is_silent and info.started_ms < self.started_ms

    def take_info(self, info: ReceiverHello, now: float) -> None:
        """Note what its hello tells of it."""
        self.serving, self.last_seen, self.started_ms = info.serving, now, info.started_ms
        self.is_attended = info.attended and not self.is_unheard
        self.is_pinned, self.base, self.by_folder = info.pinned, info.base, info.by_folder
        self.node, self.shared, self.shared_path = info.node, info.shared, info.shared_path
        self.seats, self.direct_base = info.seats, info.direct_base
        if info.draining and self.is_listening:
            self.move(MemberState.DRAINING)

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
        """Whether it can perform orders."""
        return self.state not in (MemberState.RETIRED, MemberState.DEAD)

    @property
    def may_fall_silent(self) -> bool:
        """Whether its silence is worth a report."""
        return self.state in (MemberState.SYNCING, MemberState.READY, MemberState.PINNED)

    @property
    def has_free_slot(self) -> bool:
        """Whether a receiver with two staging segments has one free (see `StagingArea`)."""
        return self.staging is None and (self.staged is None or self.swapping is None)

    @property
    def newest(self) -> int:
        """The newest version number that it has or is getting."""
        return max(self.serving, self.staging or 0, self.staged or 0, self.swapping or 0)

    @property
    def is_lone(self) -> bool:
        """Whether it is served without others."""
        return self.lone_rounds_left > 0

    def may_be_offered(self, number: int, now: float) -> bool:
        """Tell whether a round with version `number` may include it; most are ruled out by the first two."""
        return (
            self.has_free_slot
            and self.newest < number
            and self.state in _OFFERABLE
            and not self.is_pinned
            and now >= self.retry_at
        )

    def may_swap(self) -> bool:
        """Tell whether it holds a verified version that its engine could load now."""
        is_live = self.state in (MemberState.SYNCING, MemberState.READY)
        wants_to = self.staged is not None and self.swapping is None
        return is_live and wants_to and self.is_attended and not self.is_pinned

    def part_from_others(self) -> None:
        """Serve it alone for a while, twice as long each time that it comes to this."""
        self.lone_rounds_left = min(MAX_LONE_ROUNDS, 2**self.num_parted)
        self.num_parted += 1

    def note_arrival(self, round_: Round) -> None:
        """A round has brought it a version, without others or with them, or by a copy of its node."""
        self.num_failures, self.mapped_from = 0, round_.holder
        if round_.is_direct:
            self.num_direct_failures = 0
        if self.is_lone and round_.lane not in (Lane.MAIN, Lane.JOINERS):
            self.lone_rounds_left -= 1
        elif not round_.is_mapped:
            self.num_parted = 0

    def leave_direct_path(self, number: int, *, is_blameless: bool = False) -> None:
        """Take version `number` staged, and more versions after it the more often the path has failed."""
        num_versions = 1 if is_blameless else min(MAX_STAGED_VERSIONS, 2**self.num_direct_failures)
        self.staged_until = number - 1 + num_versions
        self.num_direct_failures += not is_blameless

    def forget_progress(self) -> None:
        """Forget its staged version, its transfer and its swap."""
        self.staging = self.staged = self.swapping = None

    def fence(self, newest_number: int) -> None:
        """Take its leases away until it serves `newest_number`, the newest when it failed."""
        self.fenced_until = newest_number
        if self.state in (MemberState.SYNCING, MemberState.READY, MemberState.PINNED):
            self.move(MemberState.SUSPECT)

    def hear_replica(self, is_attended: bool) -> None:
        """Note a report of its replica: the member's state is trusted again."""
        self.is_unheard = False
        self.is_attended = self.is_attended or is_attended
        self.catch_up()

    def catch_up(self) -> None:
        """Lift the fence and the suspicion if they no longer hold, after a message or a load."""
        if self.fenced_until is not None and self.serving >= self.fenced_until:
            self.fenced_until = None
        has_weights = self.serving != UNLOADED and not self.is_unheard
        if self.state is MemberState.STARTING and (self.is_attended or has_weights):
            self.move(MemberState.SYNCING)
        if self.state not in _STARTED:
            return
        if not has_weights or self.is_fenced:
            self.move(MemberState.SYNCING)
            return
        if self.state is not MemberState.PINNED or not self.is_pinned:
            self.move(MemberState.READY)
        if self.is_pinned:
            self.move(MemberState.PINNED)
