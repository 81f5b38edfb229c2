"""Messages of the fleet machine: its events and its actions (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from asyncrl.core.states import ServiceState


class Cause(Enum):
    """Cause of a service's end.

    DEATH: the process exited or is unresponsive; a restart may work. ERROR: the service raised an error;
    recurring before the first success, it is permanent. FINAL: not retryable.
    """

    DEATH = "death"
    ERROR = "error"
    FINAL = "final"


@dataclass(frozen=True)
class Begin:
    """The run starts: start all services."""

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
    """A process of the service is suspended (SIGSTOP)."""

    name: str


@dataclass(frozen=True)
class Gone:
    """A service's process is dead, or its service failed.

    Attributes:
        reason: A clause that follows its name: "was killed".
        cause: Decides whether a restart is tried.
    """

    name: str
    reason: str
    cause: Cause = Cause.DEATH


@dataclass(frozen=True)
class Wanted:
    """Desired number of active and standby replicas; None leaves a number unchanged."""

    replicas: int | None = None
    standby: int | None = None


@dataclass(frozen=True)
class Leave:
    """A replica shall drain and leave; another takes its place if one is wanted."""

    index: int


@dataclass(frozen=True)
class Finish:
    """The learner is asked to end: later exits of the learner are not faults."""


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
    """Report that the run continues without a replica that failed to start."""

    service: str
    reason: str


@dataclass(frozen=True)
class Retire:
    """Report that a replica used up its restarts and is retried after `back_in_s`."""

    service: str
    reason: str
    back_in_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run: `service` cannot be kept up. `would_repeat`: the next start would fail in the same way."""

    service: str
    reason: str
    would_repeat: bool = False


Effect = Start | Kill | End | Drain | Promote | Forgo | Retire | GiveUp
