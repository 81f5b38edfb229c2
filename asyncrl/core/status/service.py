"""Statuses of services: what any says, and those of the supervisor, buffer, learner and weight sync (pure).

A service of which no more is known than its process (it starts, it died, it does not answer) has a plain
`ServiceStatus`; one that has spoken has that of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.core.obstacle import Obstacle
from asyncrl.core.rpc.message import Message
from asyncrl.core.states import RunState, ServiceState

BUFFER, LEARNER, COORDINATOR, PUBLISHER = "buffer.0", "learner.0", "weight_sync.0", "publisher.0"
NUM_INDICES = 10_000
"""Services of a kind are numbered below it: it bounds how many others may claim to be."""


def kind_of(name: str) -> str:
    """Return the kind of the service `name`: `rollout` of `rollout.3`."""
    return name.partition(".")[0]


class ServiceStatus(Message, frozen=True, kw_only=True):
    """Status of any service.

    Attributes:
        error: Cause of its failure or end. error_kinds: Classes of that error and of its causes.
        failure: Cause of its last failure, while it has not come up since; set by the supervisor.
        node: Its node in the cluster, empty on one machine; None until a process has reported it.
        obstacles: Obstacles to its work.
    """

    state: ServiceState
    error: str = ""
    error_kinds: tuple[str, ...] = ()
    failure: str = ""
    pid: int | None = None
    node: str | None = None
    obstacles: tuple[Obstacle, ...] = ()


class SupervisorStatus(ServiceStatus, frozen=True, kw_only=True):
    """Status of the supervisor, for the head: how its run is, and the steps that it has done."""

    run: RunState
    step: int


# --- the buffer -------------------------------------------------------------------------------------


class JournalStatus(Message, frozen=True, kw_only=True, tag="none", tag_field="kind"):
    """Status of a journal; `is_away`: it takes nothing now, and the buffer waits for it."""

    is_away: bool = False

    @property
    def kind(self) -> str:
        """The journal's name in the configuration."""
        return str(self.__struct_config__.tag)

    @property
    def told_losses(self) -> tuple[str, ...]:
        """A sentence of each of the newest losses of what it held."""
        return ()


class FileJournalStatus(JournalStatus, frozen=True, kw_only=True, tag="file"):
    """`unsynced_s`: how long ago the oldest commit was that a power cut could cost."""

    fsync: str
    unsynced_s: float


class RedisJournalStatus(JournalStatus, frozen=True, kw_only=True, tag="redis"):
    """`redis`: where; `backlog`: commits that wait for it; `wiped`: how often it lost what it held."""

    redis: str
    backlog: int
    wiped: int
    losses: tuple[str, ...]

    @property
    def told_losses(self) -> tuple[str, ...]:
        return self.losses


AnyJournalStatus = JournalStatus | FileJournalStatus | RedisJournalStatus


class PendingTickets(Message, frozen=True):
    """Numbers of open tickets by state."""

    issued: int = 0
    leased: int = 0
    stored: int = 0
    reserved: int = 0

    @property
    def num_arrived(self) -> int:
        """Tickets whose groups are complete."""
        return self.stored + self.reserved


class FinishedEvaluation(Message, frozen=True):
    """An evaluation whose parts have all come, at the weights of `version`."""

    id: int
    step: int
    version: int
    metrics: Mapping[str, int | float]


class BufferStatus(ServiceStatus, frozen=True, kw_only=True):
    """Status of the buffer, added up at most half a second ago.

    Attributes:
        issued, trained, dropped, pending, prompts_drawn, given_up, open, residue: See `Census`.
        stored_groups: Complete groups that wait to be trained. memory_bytes: Of payloads.
        leases: Groups that each replica holds.
        reissues: Tickets that were issued again, by cause.
        checkpoints: Steps. evaluations: The newest; `evaluations_pending` more are ordered.
        parked: Requests that wait.
    """

    address: str
    paused: bool
    issued: int
    trained: int
    dropped: Mapping[str, int]
    pending: PendingTickets
    prompts_drawn: int
    given_up: int
    open: int
    residue: int
    stored_groups: int
    memory_bytes: int
    steps_trained: int
    num_prompts: int
    lineage: int
    last_version: int
    token: int
    leases: Mapping[str, int]
    reissues: Mapping[str, int]
    checkpoints: tuple[int, ...]
    evaluations: tuple[FinishedEvaluation, ...]
    evaluations_pending: int
    parked: int
    journal: AnyJournalStatus
    counters: Mapping[str, int]


# --- the learner ------------------------------------------------------------------------------------


class GuardFinding(Message, frozen=True):
    """Finding of the guard at a step, the `number`-th of this incarnation of the learner."""

    number: int
    step: int
    kind: str
    text: str


class LearnerStatus(ServiceStatus, frozen=True, kw_only=True):
    """Status of a rank of the learner; of most, only its leader knows.

    Attributes:
        step: The last that is done. resumed_step: That this incarnation went on from.
        last_evaluation: Id of the last evaluation that was ordered, 0 for none.
        torn: A sentence of each checkpoint that was found damaged.
        checkpointed_step: Of the newest checkpoint of this incarnation, 0 for none.
    """

    step: int
    resumed_step: int
    last_evaluation: int
    paused: bool
    torn: tuple[str, ...]
    checkpointed_step: int
    findings: tuple[GuardFinding, ...]

    @property
    def has_trained(self) -> bool:
        """Whether this incarnation has done a step."""
        return self.step > self.resumed_step


# --- weight sync ------------------------------------------------------------------------------------


class RoundStatus(Message, frozen=True, kw_only=True):
    """A round under way: `seconds` since it began, and what became of it at each member.

    `holder`: Process of the members' node whose copy they map; empty if bytes are sent.
    """

    lane: str
    phase: str
    version: int
    membership: int
    seconds: float
    parts: Mapping[str, str]
    holder: str = ""


class MemberStatus(Message, frozen=True, kw_only=True):
    """Status of a member by the coordinator.

    Attributes:
        version, staged, swapping: Version numbers, 0 for none.
        served_alone: It is served in rounds of its own.
        error: Its last.
        silent_s: Since it was last heard; None where that was not asked.
        mapped_from: Process of its node whose copy of the version it maps; empty if the bytes were sent to
            it.
    """

    state: ServiceState
    version: int
    staged: int
    swapping: int
    fenced: bool
    pinned: bool
    served_alone: bool
    last_round_s: float | None
    last_swap_s: float | None
    error: str
    silent_s: float | None = None
    mapped_from: str = ""


class CoordinatorStatus(ServiceStatus, frozen=True, kw_only=True):
    """Status of the coordinator, see `coordination.picture`.

    Attributes:
        version: The newest, as (number, step).
        round: Phase of the round of most members, None without one.
        culprit: Member blamed last, and the reason.
    """

    address: str
    token: int
    version: tuple[int, int] | None
    digest: str
    num_bytes: int
    round: str | None
    rounds: tuple[RoundStatus, ...]
    last_round_s: float | None
    longest_round_s: float
    culprit: str
    counters: Mapping[str, int]
    members: Mapping[str, MemberStatus]


class PublisherStatus(ServiceStatus, frozen=True, kw_only=True):
    """Status of the publisher: newest version as (number, step), states of segments, transfers that run."""

    address: str
    version: tuple[int, int] | None = None
    segments: tuple[str, ...] = ()
    transfers: int = 0
    longest_transfer_s: float = 0.0
    counters: Mapping[str, int] = {}


class ReceiverStatus(ServiceStatus, frozen=True, kw_only=True):
    """Status of a receiver.

    Attributes:
        version, staged, committed: Numbers of the version that the engine serves, of the newest verified
            copy, and of the one that it may load; 0 for none.
        transfers: That run.
    """

    address: str
    version: int = 0
    staged: int = 0
    committed: int = 0
    pinned: bool = False
    fenced: bool = False
    transfers: int = 0
    longest_transfer_s: float = 0.0
    counters: Mapping[str, int] = {}
