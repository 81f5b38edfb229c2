"""Gathering of obstacles: what the services of a run report, and what only their supervisor sees (pure).

Owns which obstacles block the run and which only cost it a replica, and when the run must end because
nobody can go on. Every reason is the blamed service's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.obstacle import ADVISORY, Cause, Obstacle, parse_obstacles
from asyncrl.states import ServiceState

Statuses = Mapping[str, Mapping[str, Any]]

DOWN = (ServiceState.FAILED, ServiceState.DEAD)
SERVING = (ServiceState.READY, ServiceState.PINNED)
NOT_JUDGED = (
    *(ServiceState.WAITING, ServiceState.STARTING, ServiceState.SILENT),
    *(ServiceState.DRAINING, ServiceState.RETIRED, ServiceState.ENDED),
)
"""States of a replica that says nothing yet of whether it can work, or is leaving."""
MAX_REFUSALS = 6
"""Loads in a row that every replica refused, after which no version is expected to be taken any more."""


def gather(statuses: Statuses, stall: str = "") -> list[Obstacle]:
    """Return the obstacles of a run, those that block it first.

    Args:
        statuses: Of all services, by name, as they were last heard. `failure` in one is why the service
            failed last, while it has not come up since.
        stall: What the watchdog says, empty while steps are finished. It counts where nobody knows more.
    """
    reported = [one for name in sorted(statuses) for one in _of_service(name, statuses[name])]
    found = [one for one in reported if one.cause is not Cause.NO_AGENT or _is_said_by_all(one, statuses)]
    found = [one.seen(since=0.0, blocks=_blocks(one, statuses, found)) for one in found]
    if stall and not any(one.blocks for one in found):
        found.append(Obstacle("run", Cause.STALL, stall))
    order = list(Cause)
    return sorted(found, key=lambda one: (not one.blocks, order.index(one.cause), one.service))


def verdict(obstacles: Iterable[Obstacle], statuses: Statuses) -> Obstacle | None:
    """Return the obstacle that a run must end for, because no replica can take any version; None if none."""
    replicas = _replicas(statuses)
    states = [str(status.get("state")) for status in replicas.values()]
    if not replicas or any(state in SERVING or state in NOT_JUDGED for state in states):
        return None
    refusals = [one for one in obstacles if one.cause is Cause.WEIGHTS_REFUSED]
    refusing = {one.service for one in refusals if one.count >= MAX_REFUSALS}
    return refusals[0] if refusing >= set(replicas) else None


def _of_service(name: str, status: Mapping[str, Any]) -> list[Obstacle]:
    found = parse_obstacles(name, status)
    failure = str(status.get("failure") or "")
    if not failure and status.get("state") in DOWN:
        failure = str(status.get("error") or "it is gone")
    if failure:
        found.append(Obstacle(name, Cause.SERVICE_DOWN, failure))
    return found


def _is_said_by_all(obstacle: Obstacle, statuses: Statuses) -> bool:
    """Tell whether every replica that works reports this cause: agents may prefer one of them."""
    working = [status for status in _replicas(statuses).values() if status.get("state") in SERVING]
    return all(_reports(status, obstacle.cause) for status in working)


def _blocks(obstacle: Obstacle, statuses: Statuses, found: Iterable[Obstacle]) -> bool:
    """Tell whether no replica is free of trouble, for an obstacle of a replica; others but advice block."""
    if obstacle.cause in ADVISORY:
        return False
    if not obstacle.service.startswith(("rollout.", "receiver.")):
        return True
    troubled = {one.service.partition(".")[2] for one in found}
    working = [name for name, status in _replicas(statuses).items() if status.get("state") in SERVING]
    return all(name.partition(".")[2] in troubled for name in working)


def _reports(status: Mapping[str, Any], cause: Cause) -> bool:
    return any(one.cause is cause for one in parse_obstacles("", status))


def _replicas(statuses: Statuses) -> dict[str, Mapping[str, Any]]:
    """Return the replicas that are to generate."""
    return {
        name: status
        for name, status in statuses.items()
        if name.startswith("rollout.") and not status.get("standby")
    }
