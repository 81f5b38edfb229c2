"""Translation of service statuses into events of the fleet, and the order of these events.

A service counts as halted also when its own process answers but a process that it started is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.control.fleet.messages import Cause, Event, Gone, Halted, Heard
from asyncrl.control.launch.processes import is_of_service, is_stopped, stopped_services
from asyncrl.states import ServiceState

FINAL_ERRORS = frozenset({"ConfigError", "DataError", "UnstableTraining", "RewardsFailed"})
"""Classes of errors that starting a service again cannot cure."""


def events_of(run_id: str, statuses: Mapping[str, Mapping[str, Any]]) -> list[Event]:
    """Return what the statuses of a run's services mean for the fleet; silence means nothing yet."""
    is_any_silent = any(status.get("state") == ServiceState.SILENT for status in statuses.values())
    stopped = stopped_services(run_id) if is_any_silent else set()
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


def at_home(run_id: str, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return `status` without the pids of children if they mean nothing here: it lives on another node.

    Whether it does its own process tells, which is marked as that service's.
    """
    pid = status.get("pid")
    is_away = pid is not None and not is_of_service(pid, run_id, name)
    return {key: value for key, value in status.items() if key != "child_pids" or not is_away}


def event_of(name: str, status: Mapping[str, Any], *, is_halted: bool = False) -> Event | None:
    """Return what one status means."""
    state = str(status.get("state"))
    if state in (ServiceState.FAILED, ServiceState.DEAD):
        return _gone(name, state, status)
    if is_halted or any(is_stopped(pid) for pid in status.get("child_pids", ())):
        return Halted(name)
    if state == ServiceState.SILENT:
        return None
    done = "trajectories" if name.startswith("rollout.") else "step"
    return Heard(name, state, int(status.get(done, 0)))


def _gone(name: str, state: str, status: Mapping[str, Any]) -> Gone:
    error = str(status.get("error", ""))
    kinds = {*status.get("error_kinds", ()), error.partition(":")[0]}
    cause = (
        Cause.DEATH if state == ServiceState.DEAD else Cause.FINAL if kinds & FINAL_ERRORS else Cause.ERROR
    )
    word = "gone" if state == ServiceState.DEAD else "failed"
    return Gone(name, f"{word}: {error}", cause)
