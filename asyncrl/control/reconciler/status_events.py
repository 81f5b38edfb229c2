"""Translation of service statuses into events of the fleet, and the order of these events.

A service counts as halted also when its own process answers but a process that it started is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from asyncrl.control.fleet.messages import Cause, Event, Gone, Halted, Heard
from asyncrl.control.machine.processes import is_of_service, is_stopped, stopped_services
from asyncrl.core.states import ServiceState
from asyncrl.core.status.replica import ReplicaStatus
from asyncrl.core.status.service import LearnerStatus, ServiceStatus
from asyncrl.core.status.statuses import Statuses

FINAL_ERRORS = frozenset({"ConfigError", "DataError", "UnstableTraining", "RewardsFailed"})
"""Classes of errors that starting a service again cannot cure."""


def events_of(
    run_id: str, statuses: Statuses, find_stopped: Callable[[str], set[str]] = stopped_services
) -> list[Event]:
    """Return the fleet events of the services' statuses; a missing status makes none."""
    is_any_silent = any(status.state == ServiceState.SILENT for status in statuses.values())
    stopped = find_stopped(run_id) if is_any_silent else set()
    found = [event_of(name, status, is_halted=name in stopped) for name, status in statuses.items()]
    return in_order(event for event in found if event is not None)


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return events of one moment in the order in which they explain one another.

    What cannot be cured comes first; a process that is gone made others fail, so it is the one to name; an
    engine takes its receiver with it.
    """
    return sorted(events, key=_rank)


def _rank(event: Event) -> int:
    if not isinstance(event, Gone):
        return 4
    if event.cause is Cause.FINAL:
        return 0
    if event.name.startswith("receiver."):
        return 3
    return 1 if event.cause is Cause.DEATH else 2


def at_home(run_id: str, name: str, status: ServiceStatus) -> ServiceStatus:
    """Return `status` without the pids of children if they mean nothing here: it lives on another node.

    Whether it does its own process tells, which is marked as that service's.
    """
    if not isinstance(status, ReplicaStatus) or status.pid is None:
        return status
    is_home = is_of_service(status.pid, run_id, name)
    return status if is_home else msgspec.structs.replace(status, child_pids=())


def event_of(name: str, status: ServiceStatus, *, is_halted: bool = False) -> Event | None:
    """Return the event of one status."""
    if status.state in (ServiceState.FAILED, ServiceState.DEAD):
        return _gone(name, status)
    children = status.child_pids if isinstance(status, ReplicaStatus) else ()
    if is_halted or any(map(is_stopped, children)):
        return Halted(name)
    if status.state == ServiceState.SILENT:
        return None
    return Heard(name, status.state, _num_done(status))


def _num_done(status: ServiceStatus) -> int:
    """Return a service's count of finished work: an engine's answers, the learner's steps."""
    if isinstance(status, ReplicaStatus):
        return status.engine.trajectories if status.engine is not None else 0
    return status.step if isinstance(status, LearnerStatus) else 0


def _gone(name: str, status: ServiceStatus) -> Gone:
    is_dead = status.state == ServiceState.DEAD
    kinds = {*status.error_kinds, status.error.partition(":")[0]}
    cause = Cause.DEATH if is_dead else Cause.FINAL if kinds & FINAL_ERRORS else Cause.ERROR
    return Gone(name, f"{'gone' if is_dead else 'failed'}: {status.error}", cause)
