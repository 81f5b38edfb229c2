"""Services that are started, watched and restarted together (pure).

A replica is an engine's service and its receiver: the receiver may be restarted alone, the engine's only
with its receiver, whose staged copy it maps. All ranks of the learner are one unit. Publishers are one too,
and each is restarted alone. The others stand alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.control.fleet.budget import Budget
from asyncrl.core.states import ServiceState

SYNCING, ENDED, WAITING = ServiceState.SYNCING, ServiceState.ENDED, ServiceState.WAITING
STARTING_STATES = frozenset({ServiceState.STARTING, SYNCING, WAITING})
"""States of a service that cannot work yet; none of them may last."""
LEARNER, REPLICA = "learner", "replica"


class Stage(StrEnum):
    """Stage of a unit.

    DEAD: it waits for its next start. RETIRED: the same, for minutes, as its restarts are spent.
    A replica that was scaled away or has drained is not listed any more.
    """

    STARTING = "STARTING"
    SYNCING = "SYNCING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    DRAINING = "DRAINING"
    DEAD = "DEAD"
    RETIRED = "RETIRED"
    DONE = "DONE"


@dataclass
class Member:
    """One service of a unit.

    Attributes:
        is_down: It has no process, or one that is to be killed before it is started again.
        state: Its last reported state, `since` the given time in lived seconds.
        heard_at: Time of its last answer, or of its start.
        came_up: It has been able to work since it was started.
        is_halted: A process of it was seen stopped since it was heard.
    """

    name: str
    is_down: bool = True
    state: ServiceState = ServiceState.STARTING
    since: float = 0.0
    heard_at: float = 0.0
    came_up: bool = False
    is_halted: bool = False

    @property
    def is_up(self) -> bool:
        return not self.is_down and self.came_up and self.state not in STARTING_STATES

    def begin(self, now: float) -> None:
        """Take note that it is started at `now`."""
        self.is_down, self.state, self.came_up, self.is_halted = False, ServiceState.STARTING, False, False
        self.since = self.heard_at = now

    def hear(self, state: ServiceState, now: float) -> None:
        """Note its reported state."""
        self.heard_at, self.is_halted = now, False
        if state != self.state:
            self.state, self.since = state, now
        self.came_up = self.came_up or state not in STARTING_STATES


@dataclass
class Unit:
    """Services that share a fate.

    Attributes:
        key: "buffer", "learner", "replica.3".
        budget: Of its restarts.
        due: Time to start its members that are down, in lived seconds.
        is_retired: A replica whose restarts are spent; it is left alone until `due`.
        is_standby: A replica that takes no leases.
        leaving_since: Time of the request to drain.
        has_been_up: At any time of the run.
        last_reason: Cause of its last failure.
        num_restarts: Of the run.
        is_ending: It was asked to end.
        step: Highest step of the learner; `failed_step`, at its last failure.
        num_answers: Answers of a replica's engine since its start.
        num_alike: Failures in a row with the same error and without progress in between.
    """

    key: str
    members: dict[str, Member]
    budget: Budget
    due: float | None = None
    is_retired: bool = False
    is_standby: bool = False
    leaving_since: float | None = None
    has_been_up: bool = False
    last_reason: str = ""
    num_restarts: int = 0
    failed_at: float | None = field(default=None)
    is_ending: bool = False
    step: int = 0
    failed_step: int = 0
    num_alike: int = 0
    num_answers: int = 0
    is_replica: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_replica = self.key.startswith(REPLICA)  # called for every unit at every event

    @property
    def index(self) -> int:
        """Of a replica."""
        return int(self.key.rpartition(".")[2])

    @property
    def is_leaving(self) -> bool:
        return self.leaving_since is not None

    @property
    def is_up(self) -> bool:
        return all(member.is_up for member in self.members.values())

    @property
    def has_ended(self) -> bool:
        """Whether the learner's work is done: its leader has ended by itself."""
        return self.key == LEARNER and self.members["learner.0"].state == ENDED

    @property
    def is_done(self) -> bool:
        """Whether it is to work no more, so that it can be lost no more."""
        return self.is_ending or self.has_ended

    def stage(self, now: float, suspect_s: float) -> Stage:
        """Return its stage; SUSPECT without an answer for `suspect_s`."""
        members = self.members.values()
        if self.is_done:
            return Stage.DONE
        if self.is_leaving:
            return Stage.DRAINING
        if self.is_retired:
            return Stage.RETIRED
        if any(member.is_down for member in members):
            return Stage.DEAD
        if any(member.came_up and now - member.heard_at > suspect_s for member in members):
            return Stage.SUSPECT
        if self.is_up:
            return Stage.READY
        is_syncing = any(member.state == SYNCING for member in members)
        return Stage.SYNCING if is_syncing else Stage.STARTING

    def falls_with(self, name: str) -> list[str]:
        """Return the services that must be restarted when `name` is gone."""
        if name.startswith(("receiver.", "publisher.")):
            return [name]
        return list(self.members)


def core_keys(num_ranks: int, num_publishers: int = 1) -> dict[str, tuple[str, ...]]:
    """Return the units that every run has, by key, in the order in which they are started."""
    ranks = tuple(f"learner.{rank}" for rank in range(num_ranks))
    return {
        "buffer": ("buffer.0",),
        "weight_sync": ("weight_sync.0",),
        LEARNER: ranks,
        "publisher": tuple(f"publisher.{index}" for index in range(num_publishers)),
    }


def replica_key(index: int) -> str:
    """Return the key of replica `index`."""
    return f"{REPLICA}.{index}"


def replica_names(index: int) -> tuple[str, str]:
    """Return the services of replica `index`."""
    return f"rollout.{index}", f"receiver.{index}"


def key_of(name: str) -> str:
    """Return the key of the unit that service `name` belongs to."""
    kind, _, index = name.partition(".")
    return replica_key(int(index)) if kind in ("rollout", "receiver") else kind


def make_unit(key: str, names: Iterable[str], max_restarts: int, *, is_standby: bool = False) -> Unit:
    """Return a unit whose services are not started yet."""
    members = {name: Member(name) for name in names}
    return Unit(key, members, Budget(max_restarts), is_standby=is_standby)
