"""Wait chain of a run, from the statuses of its services (pure).

    learner -> buffer -> replica -> weight sync -> publisher -> learner

Follows the edges from the learner to the service that does not move. The result is a guess from observations
and is worded as one; nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.states import SERVICE_ENDS, ServiceState

Statuses = Mapping[str, Mapping[str, Any]]

LEARNER, BUFFER, SYNC, PUBLISHER = "learner.0", "buffer.0", "weight_sync.0", "publisher.0"
WORKING = (ServiceState.READY, ServiceState.PINNED)
ABSENT = (*SERVICE_ENDS, ServiceState.SILENT, ServiceState.STARTING, ServiceState.WAITING, "None")


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
    for name in statuses:
        if name.startswith("learner.") and (state := _state(statuses, name)) in ABSENT:
            yield Edge("the run", name, f"it is {state}")
            return
    if (state := _state(statuses, BUFFER)) in ABSENT:
        yield Edge(LEARNER, BUFFER, f"it is {state}")
        return
    buffer = statuses[BUFFER]
    num_reserved = buffer.get("pending", {}).get("reserved", 0)
    num_stored = buffer.get("stored_groups", 0)
    if num_reserved or num_stored >= groups_per_step:
        num_groups = num_reserved + num_stored
        yield Edge("the run", LEARNER, f"it has {num_groups} groups to train on, and is not done")
        return
    yield Edge(LEARNER, BUFFER, f"{num_stored} of {groups_per_step} groups are stored")
    yield from _from_buffer(statuses)


def _from_buffer(statuses: Statuses) -> Iterator[Edge]:
    replicas = [name for name in sorted(statuses) if name.startswith("rollout.")]
    if not replicas:
        yield Edge(BUFFER, "rollout", "there is no replica")
    for name in replicas:
        if not statuses[name].get("standby"):
            yield from _from_replica(name, statuses)


def _from_replica(name: str, statuses: Statuses) -> Iterator[Edge]:
    state, leases = _state(statuses, name), statuses[BUFFER].get("leases", {})
    if state in ABSENT:
        yield Edge(BUFFER, name, f"it is {state}")
    elif leases.get(name):
        yield Edge(BUFFER, name, f"it holds {leases[name]} groups")
    elif state not in WORKING:
        yield Edge(BUFFER, name, f"it is {state}")
        yield from _from_weights(name, "it has no weights that it may serve", statuses)
    else:
        step = statuses[name].get("step", 0)
        if step < statuses[LEARNER].get("step", 0):
            yield from _from_weights(name, f"it serves step {step}", statuses)
        else:
            yield Edge(name, BUFFER, "it is granted no lease")


def _from_weights(name: str, why: str, statuses: Statuses) -> Iterator[Edge]:
    """Weights come from the publisher, by word of the coordinator, through the replica's receiver."""
    receiver = f"receiver.{name.partition('.')[2]}"
    for source in (SYNC, PUBLISHER, receiver):
        if (state := _state(statuses, source)) in ABSENT:
            yield Edge(name, source, f"{why}, and {source} is {state}")
            return
    yield Edge(name, SYNC, why)


def _state(statuses: Statuses, name: str) -> str:
    return str(statuses.get(name, {}).get("state"))
