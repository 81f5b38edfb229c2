"""The nouns of the ledger: tickets, their states, grants and the ledger's settings (pure)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from asyncrl.errors import ConfigError

GIVEN_UP_LOST_LEASES = 8
"""Leases that a ticket may lose, per allowed attempt, before it counts as killing its replicas."""


class State(enum.Enum):
    """Where a ticket stands. ISSUED to RESERVED are open; TRAINED, ACKED and DROPPED are settled."""

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
    """Why a ticket never changes the weights. GUARD: its update was refused, or it spoilt one."""

    STALE = "stale"
    ZERO_STD = "zero_std"
    POISON = "poison"
    GUARD = "guard"


class Reissue(enum.Enum):
    """Why a ticket went back to ISSUED."""

    EXPIRED = "expired"
    RETIRED = "retired"
    RELEASED = "released"
    FAILED = "failed"
    REVOKED = "revoked"
    LOST = "lost"


LOST_LEASE_REASONS = (Reissue.EXPIRED, Reissue.RETIRED)


@dataclass(slots=True)
class Ticket:
    """The record of one group. Only `LedgerState.apply` changes it.

    Attributes:
        id: From 1, in order of issue.
        attempt: Which try at it is current, from 1.
        pass_number, index, source: The prompt.
        position: Its place in the order of training when it was last admitted, see `Ledger`.
        parent: The dropped ticket that this one repeats, or 0.
        generation: How many dropped tickets came before it for the same prompt.
        num_failures: Attempts that failed. num_lost_leases: Leases that expired or were retired.
        replica, deadline: Who holds the lease and until when; meaningful while LEASED.
        num_tokens, num_bytes, versions: Of the payload; `versions` are its lowest and highest number.
        is_held: The payload counts against the buffer's memory.
        step: The learner step that reserved it; -1 before.
        reason: Why it was dropped. is_given_up: It was dropped and no child repeats its prompt.
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


@dataclass(frozen=True, slots=True)
class Grant:
    """A replica's right to generate one group."""

    ticket: int
    attempt: int
    source: int
    pass_number: int
    index: int
    seed: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose commit is in the journal."""

    token: int
    step: int
    digest: str


@dataclass
class Evaluation:
    """An order to evaluate at the first weights of at least `step`, and its result."""

    id: int
    step: int
    replica: str = ""
    version: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.version is not None


@dataclass(frozen=True)
class LedgerSettings:
    """What the ledger's rules are made of.

    Attributes:
        max_group_bytes: Bytes of the largest group that a replica may push.
        memory_bytes: Room for payloads; at least two batches of the largest groups, because the
            batch in training and the next one must fit together for the run to go on.
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

    def __post_init__(self) -> None:
        needed = 2 * self.groups_per_step * self.max_group_bytes
        if self.memory_bytes < needed:
            raise ConfigError(
                f"buffer.memory_bytes ({self.memory_bytes}) cannot hold two batches of "
                f"{self.groups_per_step} groups of up to {self.max_group_bytes} bytes",
                hint=f"Set buffer.memory_bytes to at least {needed}",
            )
