"""Weight-sync figures from the services' statuses: metrics, and the answer to `inspect weights` (pure)."""

from __future__ import annotations

from asyncrl.core.rpc.message import Message
from asyncrl.core.states import ServiceState
from asyncrl.core.status.replica import ReplicaStatus
from asyncrl.core.status.service import CoordinatorStatus, PublisherStatus
from asyncrl.core.status.statuses import Statuses

COUNTS = {
    "weights/rounds": "rounds",
    "weights/rounds_failed": "rounds_failed",
    "weights/bytes_sent": "bytes_sent",
    "weights/bytes_copied": "bytes_copied",
    "weights/bytes_mapped": "bytes_mapped",
    "weights/maps_failed": "maps_failed",
    "weights/skipped": "versions_skipped",
    "weights/missed_swaps": "missed_swaps",
    "weights/failed_loads": "failed_loads",
    "weights/culprits": "culprits",
}
"""Metrics that are counters of the coordinator, by their names there."""
FAILED = "rounds_failed/"
MAX_NAMED = 64
"""Replicas that have a metric each."""


def weights_metrics(statuses: Statuses) -> dict[str, float]:
    """Return how versions get to the replicas; nothing of a service that has said nothing yet."""
    return _replica_metrics(statuses) | _coordinator_metrics(statuses) | _publisher_metrics(statuses)


def _replica_metrics(statuses: Statuses) -> dict[str, float]:
    serving = [one for one in statuses.told_replicas.values() if one.version]
    if not serving:
        return {}
    gaps = {name.partition(".")[2]: one.probe_gap for name, one in statuses.engines.items()}
    known = {f"weights/probe_gap/{index}": gap for index, gap in gaps.items() if gap is not None}
    return {
        **({"weights/probe_gap_max": max(known.values())} if known else {}),
        **(known if len(gaps) <= MAX_NAMED else {}),
        "weights/version": float(min(one.version for one in serving)),
        "weights/apply_s": max(one.engine.last_swap_s if one.engine is not None else 0.0 for one in serving),
    }


def _coordinator_metrics(statuses: Statuses) -> dict[str, float]:
    status = statuses.coordinator
    if status is None:
        return {}
    counters = status.counters
    found = {name: float(counters.get(key, 0)) for name, key in COUNTS.items()}
    failed = {name.removeprefix(FAILED): count for name, count in counters.items() if name.startswith(FAILED)}
    found |= {f"weights/failed/{cause}": float(count) for cause, count in failed.items()}
    found["weights/fenced"] = float(sum(member.fenced for member in status.members.values()))
    if status.version is not None:
        found["weights/published"] = float(status.version[0])
        found["weights/bytes"] = float(status.num_bytes)
    if status.last_round_s is not None:
        found["weights/transfer_s"] = status.last_round_s
    return found


def _publisher_metrics(statuses: Statuses) -> dict[str, float]:
    found = [one.counters.get("deferred", 0) for one in statuses.values() if isinstance(one, PublisherStatus)]
    return {"weights/deferred": float(sum(found))} if found else {}


class ServedWeights(Message, frozen=True, kw_only=True):
    """Weights of a replica by its own status; None for a field that it lacks."""

    state: ServiceState
    version: int | None = None
    last_swap_s: float | None = None


class WeightsAnswer(Message, frozen=True, kw_only=True):
    """Last statuses of the weight-sync services and the replicas that have reported."""

    coordinator: CoordinatorStatus | None
    publisher: PublisherStatus | None
    replicas: dict[str, ServedWeights]


def weights_answer(statuses: Statuses) -> WeightsAnswer:
    """Return the coordinator's and the publisher's status, and each replica's version and last swap."""
    replicas = {}
    for name, one in statuses.replicas.items():
        told = one if isinstance(one, ReplicaStatus) else None
        replicas[name] = ServedWeights(
            state=one.state,
            version=told.version if told is not None else None,
            last_swap_s=told.engine.last_swap_s if told is not None and told.engine is not None else None,
        )
    return WeightsAnswer(coordinator=statuses.coordinator, publisher=statuses.publisher, replicas=replicas)
