"""Wait chain of a run, from the statuses of its services (pure).

    learner -> buffer -> replica -> weight sync -> publisher -> learner

Follows the edges from the learner to the service that does not move. The result is a guess from observations
and is worded as one; nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.core.service_status import BUFFER, COORDINATOR, LEARNER, PUBLISHER, Statuses
from asyncrl.core.states import SERVICE_ENDS, ServiceState

WORKING = (ServiceState.READY, ServiceState.PINNED)
ABSENT = (*SERVICE_ENDS, ServiceState.SILENT, ServiceState.STARTING, ServiceState.WAITING, None)


@dataclass(frozen=True)
class Edge:
    """`waiter` waits for `whom`, and `why` that does not come."""

    waiter: str
    whom: str
    why: str

    def __str__(self) -> str:
        return f"{self.waiter} waits for {self.whom}: {self.why}"


def waiting_edges(statuses: Statuses, groups_per_step: int) -> list[Edge]:
    """Return the edges along which nothing comes, from the learner on; never empty."""
    return list(_from_learner(statuses, groups_per_step))


def _from_learner(statuses: Statuses, groups_per_step: int) -> Iterator[Edge]:
    for name, rank in statuses.of_kind("learner").items():
        if rank.state in ABSENT:
            yield Edge("the run", name, f"it is {rank.state}")
            return
    if (state := statuses.state(BUFFER)) in ABSENT:
        yield Edge(LEARNER, BUFFER, f"it is {state}")
        return
    buffer = statuses.buffer
    num_reserved = buffer.pending.reserved if buffer is not None else 0
    num_stored = buffer.stored_groups if buffer is not None else 0
    if num_reserved or num_stored >= groups_per_step:
        num_groups = num_reserved + num_stored
        yield Edge("the run", LEARNER, f"it has {num_groups} groups to train on, and is not done")
        return
    yield Edge(LEARNER, BUFFER, f"{num_stored} of {groups_per_step} groups are stored")
    yield from _from_buffer(statuses)


def _from_buffer(statuses: Statuses) -> Iterator[Edge]:
    replicas, told = statuses.replicas, statuses.told_replicas
    if not replicas:
        yield Edge(BUFFER, "rollout", "there is no replica")
    for name in sorted(replicas):
        if name not in told or not told[name].standby:
            yield from _from_replica(name, statuses)


def _from_replica(name: str, statuses: Statuses) -> Iterator[Edge]:
    state, buffer = statuses.state(name), statuses.buffer
    num_leased = buffer.leases.get(name, 0) if buffer is not None else 0
    if state in ABSENT:
        yield Edge(BUFFER, name, f"it is {state}")
    elif num_leased:
        yield Edge(BUFFER, name, f"it holds {num_leased} groups")
    elif state not in WORKING:
        yield Edge(BUFFER, name, f"it is {state}")
        yield from _from_weights(name, "it has no weights that it may serve", statuses)
    elif (step := _served(name, statuses)) < (statuses.learner.step if statuses.learner is not None else 0):
        yield from _from_weights(name, f"it serves step {step}", statuses)
    else:
        yield Edge(name, BUFFER, "it is granted no lease")


def _served(name: str, statuses: Statuses) -> int:
    """Return the step of the weights that a replica serves, 0 while it does not say."""
    told = statuses.told_replicas.get(name)
    return 0 if told is None else told.step


def _from_weights(name: str, why: str, statuses: Statuses) -> Iterator[Edge]:
    """Weights come from the publisher, by word of the coordinator, through the replica's receiver."""
    receiver = f"receiver.{name.partition('.')[2]}"
    for source in (COORDINATOR, PUBLISHER, receiver):
        if (state := statuses.state(source)) in ABSENT:
            yield Edge(name, source, f"{why}, and {source} is {state}")
            return
    yield Edge(name, COORDINATOR, why)
