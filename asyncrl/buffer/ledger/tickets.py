"""The nouns of the ledger: tickets, their states, grants and the ledger's settings (pure)."""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.core.errors import ConfigError
from asyncrl.core.metrics.tallies import Tally
from asyncrl.core.states import Reason

GIVEN_UP_LOST_LEASES = 8
"""Leases that a ticket may lose, per allowed attempt, before it counts as killing its replicas."""


POLICIES = ("mask", "drop", "wait")
"""Treatments of a group with a token over the bound (`staleness.policy`)."""


class State(enum.StrEnum):
    """State of a ticket. ISSUED to RESERVED are open; TRAINED, ACKED and DROPPED are settled."""

    ISSUED = "issued"
    LEASED = "leased"
    STORED = "stored"
    RESERVED = "reserved"
    TRAINED = "trained"
    ACKED = "acked"
    DROPPED = "dropped"


OPEN_STATES = (State.ISSUED, State.LEASED, State.STORED, State.RESERVED)
TRAINED_STATES = (State.TRAINED, State.ACKED)
PAYLOAD_STATES = (State.STORED, State.RESERVED, State.TRAINED, State.ACKED)


class DropReason(enum.Enum):
    """Reason for which a ticket never changes the weights.

    STALE: over age. ZERO_VARIANCE: all its rewards are equal, so it has no advantage (DAPO's dynamic
    sampling, arXiv:2503.14476). MASKED: all its answers were cut, and such are not trained. POISON: it
    fails or kills its replicas. GUARD: its update was refused, or it spoilt one. OVERSIZED: it has a row that
    is longer than a microbatch, as a journal from before a smaller `learner.max_tokens_per_microbatch` may.
    The others: its last attempt had no reward, for this `Reason`.
    """

    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    MASKED = "masked"
    POISON = "poison"
    GUARD = "guard"
    OVERSIZED = "oversized"
    INFRASTRUCTURE = Reason.INFRASTRUCTURE.value
    TIMEOUT = Reason.TIMEOUT.value
    ENVIRONMENT = Reason.ENVIRONMENT.value
    REWARD = Reason.REWARD.value
    BUDGET = Reason.BUDGET.value
    NOT_RETRYABLE = Reason.NOT_RETRYABLE.value


class Reissue(enum.Enum):
    """Reason for which a ticket went back to ISSUED."""

    EXPIRED = "expired"
    DEREGISTERED = "deregistered"
    RELEASED = "released"
    FAILED = "failed"
    REVOKED = "revoked"
    LOST = "lost"
    PARTIAL = "partial"


class PartialLoss(enum.Enum):
    """Reason for which a partial rollout is not continued."""

    STALE = "stale"
    LOST = "lost"


LOST_LEASE_REASONS = (Reissue.EXPIRED, Reissue.DEREGISTERED)


class PartialRollout(NamedTuple):
    """Partial work that a later attempt goes on from; it counts against memory.

    Attributes:
        attempt: The last one that added to it. versions: The lowest and highest number that sampled it.
        num_records: Records of finished turns that make it up; 0 for a group of a draining replica.
    """

    attempt: int
    num_tokens: int
    num_bytes: int
    versions: tuple[int, int]
    num_records: int = 0


@dataclass(slots=True)
class Ticket:
    """The record of one group. Only `LedgerState.apply` changes it.

    Attributes:
        id: From 1, in order of issue.
        attempt: Number of the current attempt, from 1.
        pass_number, index, source: The prompt.
        position: Its place in the order of training when it was last admitted, see `Ledger`.
        parent: The dropped ticket that this one repeats, or 0.
        generation: Number of dropped tickets before it for the same prompt.
        num_failures: Attempts that failed. num_lost_leases: Leases that expired or were deregistered.
        replica, deadline: Holder and end of the lease; meaningful while LEASED.
        version: While LEASED, the oldest version number that its tokens may have: the one that the
            replica served when it asked, or an older one of its partial rollout.
        partial: The partial rollout that the next attempt goes on from.
        num_tokens, num_bytes, versions: Of the payload; `versions` are its lowest and highest number.
        is_held: The payload counts against the buffer's memory.
        step: The learner step that reserved it; -1 before.
        reason: Cause of its drop. is_given_up: It was dropped and no child repeats its prompt.
    """

    id: int
    source: int
    pass_number: int
    index: int
    position: int
    parent: int = 0
    generation: int = 0
    attempt: int = 1
    state: State = State.ISSUED
    num_failures: int = 0
    num_lost_leases: int = 0
    replica: str = ""
    deadline: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0
    versions: tuple[int, int] = (0, 0)
    is_held: bool = False
    step: int = -1
    reason: DropReason | None = None
    is_given_up: bool = False
    version: int = 0
    partial: PartialRollout | None = None

    @property
    def is_new(self) -> bool:
        """Whether nobody has begun it, nor a dropped one that it repeats."""
        return self.attempt == 1 and not self.parent

    @property
    def partial_attempt(self) -> int:
        """The attempt that made the partial rollout, 0 for none."""
        return self.partial.attempt if self.partial is not None else 0


@dataclass(frozen=True, slots=True)
class Grant:
    """A replica's right to generate one group.

    Attributes:
        partial_attempt: The attempt whose partial rollout the buffer holds for this one, 0 for none.
    """

    ticket: int
    attempt: int
    source: int
    pass_number: int
    index: int
    seed: int
    partial_attempt: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose commit is in the journal."""

    token: int
    step: int
    digest: str


class Part(NamedTuple):
    """A replica's part of an evaluation: of the held-out prompts every `num_parts`-th, from `part` on."""

    id: int
    step: int
    part: int
    num_parts: int


MAX_KEPT_EVALUATIONS = 64
"""Results in the ledger; each has up to some thousand figures."""


@dataclass
class Evaluation:
    """An order to evaluate at the first weights of at least `step`, and its result.

    Attributes:
        served: The version at which its parts are answered, None until the first is handed out.
        holders: The replica that works on a part, by part. results: Tallies of finished parts.
        version, metrics: The result; None before.
    """

    id: int
    step: int
    num_parts: int = 1
    served: int | None = None
    holders: dict[int, str] = field(default_factory=dict)
    results: dict[int, dict[str, Tally]] = field(default_factory=dict)
    version: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.version is not None

    def part_of(self, replica: str) -> int | None:
        """Return the part that the replica works on."""
        return next((part for part, holder in self.holders.items() if holder == replica), None)

    def next_free(self) -> int | None:
        """Return the first part that nobody works on and that is not finished."""
        taken = self.holders.keys() | self.results.keys()
        return next((part for part in range(self.num_parts) if part not in taken), None)

    def give(self, part: int, replica: str, version: int | None) -> None:
        """Note that a replica works on a part at its version; with no name, that nobody does any more."""
        if replica:
            self.holders[part], self.served = replica, version
        else:
            self.holders.pop(part, None)

    def restart(self) -> None:
        """Throw the results away."""
        self.served = None
        self.results.clear()

    def finish_part(self, part: int, version: int, tallies: dict[str, Tally]) -> None:
        """Keep the result of a part."""
        self.holders.pop(part, None)
        self.served, self.results[part] = version, tallies

    def finish(self, version: int, metrics: dict[str, float]) -> None:
        """Keep the result, and no parts any more."""
        self.version, self.metrics = version, metrics
        self.holders.clear()
        self.results.clear()


def finish_evaluation(
    evaluations: dict[int, Evaluation], number: int, version: int, metrics: dict[str, float]
) -> None:
    """Keep a result, and of all results the newest: the rows of metrics have the others."""
    evaluations[number].finish(version, metrics)
    done = sorted(one.id for one in evaluations.values() if one.is_done)
    for old in done[:-MAX_KEPT_EVALUATIONS]:
        del evaluations[old]


@dataclass(frozen=True)
class LedgerSettings:
    """Settings of the ledger's rules.

    Attributes:
        max_group_bytes: Bytes of the largest group that a replica may push.
        memory_bytes: Room for payloads; at least two batches of the largest groups, because the
            batch in training and the next one must fit together for the run to go on.
        policy: Treatment of a group with a token over `max_lag`, see `Ledger`.
        max_wait_s: Under `wait`, the most time that a complete batch waits for groups in flight.
        is_ascending: Prompts are numbered from easy to hard, see `PromptOrder`.
        shares_prefixes: Replicas share the KV cache of equal beginnings, see `rules.placement`.
        keeps_sessions: Partial work is agents' sessions, and its replica's until the lease would have ended.
        evaluation_parts: Number of parts of an evaluation; so many replicas may work on it at once.
    """

    run_seed: int
    groups_per_step: int
    max_lag: int
    ready_batches: int
    memory_bytes: int
    max_group_bytes: int
    lease_s: float
    max_attempts: int
    is_shuffled: bool = True
    policy: str = "mask"
    max_wait_s: float = 30.0
    is_ascending: bool = False
    evaluation_parts: int = 1
    shares_prefixes: bool = False
    keeps_sessions: bool = False

    @property
    def left_over_groups(self) -> int:
        """Stored groups that a reservation shall leave: a quarter of a batch, and all beyond one."""
        return (4 * self.ready_batches - 3) * self.groups_per_step // 4

    @property
    def needed_bytes(self) -> int:
        """Memory that only whole groups may use: two batches of the largest ones."""
        return 2 * self.groups_per_step * self.max_group_bytes

    def __post_init__(self) -> None:
        assert self.policy in POLICIES, "checked by the configuration"
        needed = self.needed_bytes
        if self.memory_bytes < needed:
            raise ConfigError(
                f"buffer.memory_bytes ({self.memory_bytes}) cannot hold two batches of "
                f"{self.groups_per_step} groups of up to {self.max_group_bytes} bytes",
                hint=f"Set buffer.memory_bytes to at least {needed}",
            )


def with_record(ticket: Ticket, number: int, num_bytes: int, versions: tuple[int, int]) -> PartialRollout:
    """Return a ticket's partial rollout with record `number` of its turns; the first one replaces it."""
    before = ticket.partial
    if before is not None and number > 1:
        num_bytes += before.num_bytes
        versions = min(versions[0], before.versions[0]), max(versions[1], before.versions[1])
    return PartialRollout(ticket.attempt, 0, num_bytes, versions, number)


def leave_parts(parts: dict[int, list[tuple[int, ...]]], ticket: Ticket) -> None:
    """Take a ticket that leaves its batch out of the parts of its step."""
    if ticket.step in parts:
        parts[ticket.step] = [
            tuple(number for number in part if number != ticket.id) for part in parts[ticket.step]
        ]


def take_issued(heap: list[int], number: int) -> None:
    """Take a ticket out of the issued ones: the oldest, unless that waits for its source."""
    if heap[0] == number:
        heapq.heappop(heap)
    else:
        heap.remove(number)
        heapq.heapify(heap)
