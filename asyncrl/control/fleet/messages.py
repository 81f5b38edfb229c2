"""Messages of the fleet machine: its events and its actions (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from asyncrl.core.states import ServiceState


class Cause(Enum):
    """Cause of a service's end.

    DEATH: its process ended or does not answer, which says nothing of the next one. ERROR: of its own; if it
    recurs before the service ever worked, that is how it is. FINAL: an error that trying again cannot cure.
    """

    DEATH = "death"
    ERROR = "error"
    FINAL = "final"


@dataclass(frozen=True)
class Begin:
    """The run starts: all services are to be started."""

    replicas: int
    standby: int = 0


@dataclass(frozen=True)
class Heard:
    """A service answered with its state.

    Attributes:
        num_done: Of the learner: the last step that it has done. Of an engine: answers since it was started.
    """

    name: str
    state: ServiceState
    num_done: int = 0


@dataclass(frozen=True)
class Halted:
    """Somebody has stopped a process of a service: it lives, and does nothing."""

    name: str


@dataclass(frozen=True)
class Gone:
    """A service's process is dead, or its service failed.

    Attributes:
        reason: A clause that follows its name: "was killed".
        cause: How likely it is to happen again.
    """

    name: str
    reason: str
    cause: Cause = Cause.DEATH


@dataclass(frozen=True)
class Wanted:
    """So many replicas are to lease, and so many to stand by; None leaves a number as it is."""

    replicas: int | None = None
    standby: int | None = None


@dataclass(frozen=True)
class Leave:
    """This replica is to drain and leave; another takes its place if one is wanted."""

    index: int


@dataclass(frozen=True)
class Finish:
    """The learner is asked to end: nothing that happens to it from here on is a loss."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Begin | Heard | Halted | Gone | Wanted | Leave | Finish | Tick


@dataclass(frozen=True)
class Start:
    """Start a service. `is_standby`: as a replica that takes no leases."""

    name: str
    is_standby: bool = False


@dataclass(frozen=True)
class Kill:
    """End a service's process and all that it has started, and return only when they are dead."""

    name: str


@dataclass(frozen=True)
class End:
    """Let a service that has nothing left to do end by itself, for a while; then kill it."""

    name: str


@dataclass(frozen=True)
class Drain:
    """Ask a replica to hand back what it holds and to end."""

    index: int


@dataclass(frozen=True)
class Promote:
    """Let a replica that stood by take leases."""

    index: int


@dataclass(frozen=True)
class Forgo:
    """Tell that the run goes on without a replica that does not start: `service` failed, for `reason`."""

    service: str
    reason: str


@dataclass(frozen=True)
class Retire:
    """Tell that a replica is left alone for `back_in_s`: `service` died once too often, for `reason`."""

    service: str
    reason: str
    back_in_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run: `service` cannot be kept up, for `reason`; `would_repeat`: nor could the next start."""

    service: str
    reason: str
    would_repeat: bool = False


Effect = Start | Kill | End | Drain | Promote | Forgo | Retire | GiveUp
