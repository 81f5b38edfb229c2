"""The snapshot of a run: the data that its control API returns, and the CLI and the page show (pure).

Owns its form as JSON. Where that has an empty text or object for what is not known, the struct has None.
A field that is not known is left out at the top and of a service; elsewhere it makes the snapshot one of
another version of asyncrl, which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

import msgspec

from asyncrl.control.diagnosis.waits import Diagnosis
from asyncrl.control.fleet.units import Stage
from asyncrl.core.errors import WireError
from asyncrl.core.obstacle import Obstacle
from asyncrl.core.states import RunState, ServiceState
from asyncrl.core.status.replica import ReplicaStatus
from asyncrl.core.status.service import (
    AnyJournalStatus,
    BufferStatus,
    CoordinatorStatus,
    PendingTickets,
    PublisherStatus,
    ReceiverStatus,
    ServiceStatus,
)


class Health(StrEnum):
    """Whether all of a run's services do their work."""

    OK = "ok"
    DEGRADED = "degraded"


class ServiceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a service beyond its own status, from the supervisor.

    Attributes:
        stage: Of its unit, None before the first pulse.
        reason: Why it has no process. back_in_s: In how many seconds it is started again.
    """

    heartbeat_age_s: float | None = None
    restarts: int = 0
    stage: Stage | None = None
    standby: bool = False
    reason: str = ""
    back_in_s: float | None = None


class ServiceView(ServiceFacts, frozen=True, kw_only=True):
    """A service as a snapshot tells of it; `version` is a number, or (number, step)."""

    state: ServiceState
    version: int | tuple[int, int] | None = None
    pid: int | None = None
    address: str | None = None
    gateway: str | None = None
    node: str | None = None
    trajectories: int | None = None

    @property
    def number(self) -> int | None:
        """The number of its version."""
        return self.version[0] if isinstance(self.version, tuple) else self.version


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """The buffer's account, see `BufferStatus`."""

    issued: int
    trained: int
    dropped: Mapping[str, int]
    pending: PendingTickets
    prompts_drawn: int
    given_up: int
    open: int
    residue: int
    stored_groups: int
    checkpoints: tuple[int, ...]
    counters: Mapping[str, int]
    journal: AnyJournalStatus

    @property
    def num_dropped(self) -> int:
        """Tickets that were dropped for any reason."""
        return sum(self.dropped.values())


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run: complete from its supervisor, partial from other processes while there is none.

    Attributes:
        state: None of a run that has told nothing yet.
        time_left_s: A guess, None without one.
        ready_groups: Complete groups that the buffer holds at most. torn: Checkpoints that were damaged.
        metrics: The newest row. evaluation: The newest row of one.
        events: The newest, the oldest of them first; their fields differ by kind.
        outcome: End of the run, known before its state shows it.
        is_over: No process is left that could add to it.
    """

    TOLD: ClassVar[tuple[str, ...]] = ()
    """The fields that stand in JSON, empty for all."""

    run: str = ""
    run_id: str = ""
    folder: str = ""
    state: RunState | None = None
    phase: str = ""
    health: Health | None = None
    step: int | None = None
    steps: int | None = None
    time_left_s: float | None = None
    max_lag: int | None = None
    ready_groups: int | None = None
    torn: tuple[str, ...] = ()
    resumed_step: int = 0
    paused: bool = False
    metrics: Mapping[str, object] = {}
    services: Mapping[str, ServiceView] = {}
    bottleneck: Diagnosis = Diagnosis()
    obstacles: tuple[Obstacle, ...] = ()
    events: tuple[Mapping[str, object], ...] = ()
    error: str | None = None
    outcome: RunState | None = None
    ledger: LedgerView | None = None
    accuracy: float | None = None
    evaluation: Mapping[str, object] = {}
    is_over: bool = False

    @property
    def is_degraded(self) -> bool:
        """Whether the supervisor says so."""
        return self.health is Health.DEGRADED

    @property
    def is_held_up(self) -> bool:
        """Whether the supervisor says so, or does not answer."""
        return self.is_degraded or self.state is RunState.SILENT


class HeadWord(Snapshot, frozen=True, kw_only=True):
    """Snapshot by the head while no supervisor answers."""

    TOLD: ClassVar[tuple[str, ...]] = ("run", "state", "phase")


class LastWord(Snapshot, frozen=True, kw_only=True):
    """Snapshot of a run that is over, from its files."""

    TOLD: ClassVar[tuple[str, ...]] = ("run", "state", "step", "accuracy", "error", "is_over")


SUPERVISORS = tuple(name for name in Snapshot.__struct_fields__ if name != "is_over")
EMPTY: Mapping[str, object] = {"outcome": "", "ledger": {}}
"""JSON values that stand for None."""


def values_of(snapshot: Snapshot) -> dict[str, object]:
    """Return a snapshot as its JSON has it."""
    found: dict[str, object] = msgspec.to_builtins(snapshot)
    if snapshot.services:
        found["services"] = {name: _values_of_service(one) for name, one in snapshot.services.items()}
    found |= {name: empty for name, empty in EMPTY.items() if found[name] is None}
    return {name: found[name] for name in snapshot.TOLD or SUPERVISORS}


def _values_of_service(service: ServiceView) -> dict[str, object]:
    found: dict[str, object] = msgspec.to_builtins(service)
    return {**found, "stage": service.stage or ""}


def read_snapshot(values: Mapping[str, object]) -> Snapshot:
    """Return the snapshot in its JSON.

    Raises:
        WireError: It is none.
    """
    known = {name: value for name, value in values.items() if value not in (None, EMPTY.get(name))}
    services = known.get("services")
    if isinstance(services, Mapping):
        known["services"] = {name: _without_empty_stage(one) for name, one in services.items()}
    try:
        return msgspec.convert(known, Snapshot)
    except msgspec.ValidationError as error:
        raise WireError(f"what the run tells of itself cannot be read: {error}") from None


def _without_empty_stage(service: object) -> object:
    if not isinstance(service, Mapping) or service.get("stage") != "":
        return service
    return {name: value for name, value in service.items() if name != "stage"}


VERSIONED = (ReplicaStatus, ReceiverStatus, CoordinatorStatus, PublisherStatus)
SERVERS = (BufferStatus, ReceiverStatus, CoordinatorStatus, PublisherStatus)
"""Services that say where they listen."""


def view_service(status: ServiceStatus, facts: ServiceFacts) -> ServiceView:
    """Return a service as a snapshot tells of it."""
    replica = status if isinstance(status, ReplicaStatus) else None
    return ServiceView(
        state=status.state,
        version=status.version if isinstance(status, VERSIONED) else None,
        pid=status.pid,
        address=status.address if isinstance(status, SERVERS) else None,
        gateway=replica.gateway.url if replica and replica.gateway else None,
        node=status.node,
        trajectories=replica.engine.trajectories if replica and replica.engine else None,
        **msgspec.structs.asdict(facts),
    )


def view_ledger(buffer: BufferStatus | None) -> LedgerView | None:
    """Return a snapshot's account of the buffer, None before the buffer's first status."""
    if buffer is None:
        return None
    return LedgerView(**{name: getattr(buffer, name) for name in LedgerView.__struct_fields__})
