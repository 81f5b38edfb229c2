"""Gathering of obstacles: those that services report, and those that only the supervisor sees (pure).

Owns which obstacles block the run and which only cost it a replica, and when the run must end because
nobody can go on. Every reason is the blamed service's own.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from asyncrl.core.obstacle import ADVISORY, Cause, Obstacle
from asyncrl.core.states import ServiceState
from asyncrl.core.status.replica import ReplicaStatus
from asyncrl.core.status.service import ServiceStatus
from asyncrl.core.status.statuses import Statuses

DOWN = (ServiceState.FAILED, ServiceState.DEAD)
SERVING = (ServiceState.READY, ServiceState.PINNED)
NOT_JUDGED = (
    *(ServiceState.WAITING, ServiceState.STARTING, ServiceState.SILENT, ServiceState.PINNED),
    *(ServiceState.DRAINING, ServiceState.RETIRED, ServiceState.ENDED),
)
"""States of a replica that has not shown yet that it can work, is offered no version, or is leaving."""
MAX_TRIES = {Cause.WEIGHTS_REFUSED: 6, Cause.WEIGHTS_UNDELIVERED: 60}
"""Tries in a row that a version failed to get into a replica, after which none is expected to. Transfers
are tried again with growing pauses of at most 5 s: 60 take five minutes, in which `/dev/shm` may be freed."""


def gather(statuses: Statuses, stall: str = "") -> list[Obstacle]:
    """Return the obstacles of a run, those that block it first.

    Args:
        statuses: Of all services, by name, as last heard. `failure` in one is the service's last error,
            while it has not come up since.
        stall: The watchdog's report, empty while steps are finished. Used where no service reports more.
    """
    reported = [one for name in sorted(statuses) for one in _of_service(name, statuses[name])]
    working = {name: status for name, status in _replicas(statuses).items() if status.state in SERVING}
    is_agentless = all(_reports(status, Cause.NO_AGENT) for status in working.values())
    found = [one for one in reported if one.cause is not Cause.NO_AGENT or is_agentless]  # agents may choose
    has_free = not {_number_of(name) for name in working} <= {_number_of(one.service) for one in found}
    found = [one.seen(since=0.0, blocks=_blocks(one, has_free=has_free)) for one in found]
    if stall and not any(one.blocks for one in found):
        found.append(Obstacle("run", Cause.STALL, stall))
    order = list(Cause)
    return sorted(found, key=lambda one: (not one.blocks, order.index(one.cause), one.service))


def verdict(obstacles: Iterable[Obstacle], statuses: Statuses) -> Obstacle | None:
    """Return the obstacle that a run must end for, because no replica can take any version; None if none.

    Versions may fail to load in one replica and fail to reach the receiver of another.
    """
    replicas = _replicas(statuses)
    if not replicas or any(status.state in NOT_JUDGED for status in replicas.values()):
        return None
    lasting = [one for one in obstacles if one.cause in MAX_TRIES and one.count >= MAX_TRIES[one.cause]]
    is_lost = {_number_of(name) for name in replicas} <= {_number_of(one.service) for one in lasting}
    return lasting[0] if is_lost else None


def _number_of(service: str) -> str:
    """Return what a replica and its receiver have in common."""
    return service.partition(".")[2]


def _of_service(name: str, status: ServiceStatus) -> list[Obstacle]:
    found = [msgspec.structs.replace(one, service=one.service or name) for one in status.obstacles]
    failure = status.failure
    if not failure and status.state in DOWN:
        failure = status.error or "it is gone"
    if failure:
        found.append(Obstacle(name, Cause.SERVICE_DOWN, failure))
    return found


def _blocks(obstacle: Obstacle, *, has_free: bool) -> bool:
    """Tell whether an obstacle stops the run: advice never; one of a replica if no other is free."""
    is_of_replica = obstacle.service.startswith(("rollout.", "receiver."))
    return obstacle.cause not in ADVISORY and not (is_of_replica and has_free)


def _reports(status: ServiceStatus, cause: Cause) -> bool:
    return any(one.cause is cause for one in status.obstacles)


def _replicas(statuses: Statuses) -> dict[str, ServiceStatus]:
    """Return the replicas that should generate."""
    return {
        name: status
        for name, status in statuses.replicas.items()
        if not (isinstance(status, ReplicaStatus) and status.standby)
    }
