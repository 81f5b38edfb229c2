"""Statuses: one struct for each kind of service, and their way across the edge of a process (pure).

A service of which no more is known than its process (it starts, it died, it does not answer) has a plain
`ServiceStatus`; one that has spoken has that of its kind. Invariant: what arrives is a struct of the kind
that the service's name says, or it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from asyncrl.core.errors import WireError
from asyncrl.core.obstacle import Obstacle
from asyncrl.core.rpc.message import Message
from asyncrl.core.states import RunState, ServiceState

BUFFER, LEARNER, COORDINATOR, PUBLISHER = "buffer.0", "learner.0", "weight_sync.0", "publisher.0"
NUM_INDICES = 10_000
"""Services of a kind are numbered below it: it bounds how many others may claim to be."""


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


# --- a replica --------------------------------------------------------------------------------------


class EngineStatus(Message, frozen=True, kw_only=True):
    """Status of an engine.

    Attributes:
        tokens, trajectories: Generated since the start.
        busy_s, idle_by_cause: Seconds since the start.
        last_swap_s: Duration of the last change of weights.
    """

    in_flight_requests: int
    tokens: int
    trajectories: int
    busy_s: float
    idle_by_cause: Mapping[str, float]
    swaps: int
    last_swap_s: float

    @property
    def idle_s(self) -> float:
        """Seconds without work since the start, for any cause."""
        return sum(self.idle_by_cause.values())

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return self.busy_s + self.idle_s


class RewardStatus(Message, frozen=True):
    """Since the start: each part's (count, sum), and the failures by kind."""

    parts: Mapping[str, tuple[int, float]] = {}
    errors: Mapping[str, int] = {}


class ShapingStatus(Message, frozen=True):
    """Since the start: answers scored, those that were overlong, and the sum of what that took off."""

    scored: int = 0
    overlong: int = 0
    taken_off: float = 0.0


class GatewayStatus(Message, frozen=True):
    """Status of a gateway: its URL, open sessions, counts, and replaced parameters by name."""

    url: str
    sessions: int = 0
    sessions_counted: Mapping[str, int] = {}
    overridden: Mapping[str, int] = {}


class ReplicaStatus(ServiceStatus, frozen=True, kw_only=True):
    """Status of a replica.

    Attributes:
        version, step: Of the weights that it serves; 0 before the first.
        standby: It follows the weights and takes no leases.
        child_pids: Processes that die with it.
        engine: None until it is built; so are the others, and where the run has none.
    """

    version: int
    step: int
    standby: bool
    in_flight_groups: int
    counters: Mapping[str, int]
    child_pids: tuple[int, ...] = ()
    engine: EngineStatus | None = None
    reward: RewardStatus | None = None
    shaping: ShapingStatus | None = None
    gateway: GatewayStatus | None = None


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


# --- all of a run -----------------------------------------------------------------------------------

S = TypeVar("S", bound=ServiceStatus)


class Statuses(Mapping[str, ServiceStatus]):
    """The statuses of a run's services by name, as they were last heard."""

    def __init__(self, found: Mapping[str, ServiceStatus] | None = None) -> None:
        self._found = dict(found or {})

    def __getitem__(self, name: str) -> ServiceStatus:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __or__(self, newer: Mapping[str, ServiceStatus]) -> Statuses:
        return Statuses({**self._found, **newer})

    def state(self, name: str) -> ServiceState | None:
        """Return the state of a service, None of one that is not there."""
        found = self._found.get(name)
        return None if found is None else found.state

    @property
    def buffer(self) -> BufferStatus | None:
        """Status of the buffer, None while it has none."""
        return self._told(BUFFER, BufferStatus)

    @property
    def learner(self) -> LearnerStatus | None:
        """Status of the learner's leader, None while it has none."""
        return self._told(LEARNER, LearnerStatus)

    @property
    def coordinator(self) -> CoordinatorStatus | None:
        """Status of the coordinator of weight sync, None while it has none."""
        return self._told(COORDINATOR, CoordinatorStatus)

    @property
    def publisher(self) -> PublisherStatus | None:
        """Status of the publisher, None while it has none."""
        return self._told(PUBLISHER, PublisherStatus)

    def of_kind(self, kind: str) -> dict[str, ServiceStatus]:
        """Return the services of a kind by name."""
        return {name: status for name, status in self._found.items() if kind_of(name) == kind}

    @property
    def replicas(self) -> dict[str, ServiceStatus]:
        """The replicas by name."""
        return self.of_kind("rollout")

    @property
    def told_replicas(self) -> dict[str, ReplicaStatus]:
        """Statuses of the replicas that have reported one."""
        return {name: one for name, one in self._found.items() if isinstance(one, ReplicaStatus)}

    @property
    def engines(self) -> dict[str, EngineStatus]:
        """Statuses of the engines of the replicas that report one."""
        return {name: one.engine for name, one in self.told_replicas.items() if one.engine is not None}

    def _told(self, name: str, kind: type[S]) -> S | None:
        found = self._found.get(name)
        return found if isinstance(found, kind) else None


def kind_of(name: str) -> str:
    """Return the kind of the service `name`: `rollout` of `rollout.3`."""
    return name.partition(".")[0]


# --- the edge ---------------------------------------------------------------------------------------

KINDS: Mapping[str, type[ServiceStatus]] = {
    "buffer": BufferStatus,
    "rollout": ReplicaStatus,
    "learner": LearnerStatus,
    "weight_sync": CoordinatorStatus,
    "publisher": PublisherStatus,
    "receiver": ReceiverStatus,
    "supervisor": SupervisorStatus,
}


class _Envelope(Message, frozen=True, array_like=True):
    """`is_told`: the service itself has spoken, so that the status is of its kind."""

    is_told: bool
    status: msgspec.Raw


def pack_status(status: ServiceStatus) -> bytes:
    """Return a status as bytes, see `read_status`."""
    is_told = type(status) is not ServiceStatus
    try:
        return _pack_envelope(is_told, status)
    except UnicodeEncodeError:  # a file name, or what a library has said, may hold half of a character
        return _pack_envelope(is_told, _whole(msgspec.to_builtins(status)))


def _pack_envelope(is_told: bool, status: object) -> bytes:
    return msgspec.msgpack.encode(_Envelope(is_told, msgspec.Raw(msgspec.msgpack.encode(status))))


def _whole(value: object) -> object:
    """Return plain values with a question mark for each half of a character in their texts."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_whole(name): _whole(one) for name, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list | tuple) else value


def read_status(kind: str, data: bytes) -> ServiceStatus:
    """Return the status of a service of `kind`.

    Raises:
        WireError: The bytes are none: of another kind, damaged, or of another version of asyncrl.
    """
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        form = KINDS.get(kind, ServiceStatus) if envelope.is_told else ServiceStatus
        return msgspec.msgpack.decode(envelope.status, type=form)
    except (msgspec.MsgspecError, TypeError, RecursionError) as error:
        raise WireError(f"what it sent is no status of a {kind}: {error}") from None
