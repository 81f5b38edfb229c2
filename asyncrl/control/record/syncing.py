"""Weight-sync figures from the services' statuses: metrics, and the answer to `inspect weights` (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Statuses = Mapping[str, Mapping[str, Any]]
COORDINATOR, PUBLISHER = "weight_sync.0", "publisher.0"
COUNTS = {
    "weights/rounds": "rounds",
    "weights/rounds_failed": "rounds_failed",
    "weights/bytes_sent": "bytes_sent",
    "weights/skipped": "versions_skipped",
    "weights/missed_swaps": "missed_swaps",
    "weights/failed_loads": "failed_loads",
    "weights/culprits": "culprits",
}
"""Metrics that are counters of the coordinator, by their names there."""
FAILED = "rounds_failed/"


def weights_metrics(statuses: Statuses) -> dict[str, float]:
    """Return how versions get to the replicas; nothing of a service that has said nothing yet."""
    return _replica_metrics(statuses) | _coordinator_metrics(statuses) | _publisher_metrics(statuses)


def _replica_metrics(statuses: Statuses) -> dict[str, float]:
    replicas = [status for name, status in statuses.items() if name.startswith("rollout.")]
    serving = [status for status in replicas if status.get("version")]
    if not serving:
        return {}
    return {
        "weights/version": float(min(status["version"] for status in serving)),
        "weights/apply_s": float(max(status.get("last_swap_s", 0.0) for status in serving)),
    }


def _coordinator_metrics(statuses: Statuses) -> dict[str, float]:
    status = statuses.get(COORDINATOR, {})
    counters = status.get("counters")
    if counters is None:
        return {}
    found = {name: float(counters.get(key, 0)) for name, key in COUNTS.items()}
    failed = {name.removeprefix(FAILED): count for name, count in counters.items() if name.startswith(FAILED)}
    found |= {f"weights/failed/{cause}": float(count) for cause, count in failed.items()}
    members = status.get("members", {}).values()
    found["weights/fenced"] = float(sum(member["fenced"] for member in members))
    if status.get("version"):
        found["weights/published"] = float(status["version"][0])
        found["weights/bytes"] = float(status.get("num_bytes", 0))
    if status.get("last_round_s") is not None:
        found["weights/transfer_s"] = float(status["last_round_s"])
    return found


def _publisher_metrics(statuses: Statuses) -> dict[str, float]:
    counters = statuses.get(PUBLISHER, {}).get("counters")
    return {} if counters is None else {"weights/deferred": float(counters.get("deferred", 0))}


def weights_answer(statuses: Statuses) -> dict[str, Any]:
    """Return what the coordinator and the publisher say, and each replica's own version and last swap."""
    replicas = {name: status for name, status in statuses.items() if name.startswith("rollout.")}
    keys = ("state", "version", "last_swap_s")
    return {
        "coordinator": dict(statuses.get(COORDINATOR, {})),
        "publisher": dict(statuses.get(PUBLISHER, {})),
        "replicas": {name: {key: status.get(key) for key in keys} for name, status in replicas.items()},
    }
