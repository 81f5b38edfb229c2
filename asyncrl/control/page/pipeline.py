"""The boxes of the pipeline from left to right, and what flows between them (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.control.page.figures import DASH, count_of, figure_of, seconds_of, share_of
from asyncrl.control.page.snapshot import (
    Snapshot,
    fill_of,
    mapping_of,
    metric_of,
    services_of,
    share_done,
    state_of,
)
from asyncrl.states import ServiceState

ARRIVED_STATES = ("stored", "reserved")


def node_of(who: str) -> str:
    """Return the box of the pipeline that a service or a role belongs to, empty if to none.

    >>> node_of("rollout.3"), node_of("the learner"), node_of("publisher.0"), node_of("")
    ('replicas', 'learner', 'weights', '')
    """
    words = {
        "rollout": "replicas",
        "replica": "replicas",
        "learner": "learner",
        "buffer": "buffer",
        "reward": "replicas",
        "publisher": "weights",
        "receiver": "weights",
        "weight": "weights",
        "prompt": "prompts",
        "admission": "prompts",
    }
    return next((node for word, node in words.items() if word in who), "")


def counters_of(snapshot: Snapshot, ledger: Mapping[str, Any]) -> dict[str, float]:
    """Return what rates are made of; all of it only rises while nothing is replaced."""
    found: dict[str, float] = {}
    if ledger:
        pending, dropped = mapping_of(ledger.get("pending")), mapping_of(ledger.get("dropped"))
        trained = float(ledger.get("trained") or 0)
        arrived = trained + sum(pending.get(state, 0) for state in ARRIVED_STATES) + sum(dropped.values())
        found = {"issued": float(ledger.get("issued") or 0), "arrived": arrived, "trained": trained}
    if (published := metric_of(snapshot, "weights/published")) is not None:
        found["published"] = published
    if snapshot.get("step"):
        found["steps"] = float(snapshot["step"])
    return found


def nodes_of(snapshot: Snapshot, ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the boxes from left to right."""
    pending = mapping_of(ledger.get("pending"))
    capacity = snapshot.get("ready_groups")
    rollouts = services_of(snapshot, "rollout")
    replicas = {name: one for name, one in rollouts.items() if not one.get("standby")}
    spares = [("standby", str(len(rollouts) - len(replicas)))] if len(rollouts) > len(replicas) else []
    ready = sum(state_of(replica) == ServiceState.READY for replica in replicas.values())
    learner = services_of(snapshot, "learner").get("learner.0", {})
    return [
        _node(
            "prompts",
            "Prompts",
            count_of(ledger.get("prompts_drawn")),
            "drawn",
            [
                ("open", count_of(ledger.get("open"))),
                ("given up", count_of(ledger.get("given_up"))),
                ("pass", count_of(metric_of(snapshot, "training/epoch"))),
            ],
        ),
        _node(
            "replicas",
            "Replicas",
            f"{ready}/{len(replicas)}" if replicas else DASH,
            "ready",
            [
                ("leased", count_of(pending.get("leased"))),
                ("tokens/s", count_of(metric_of(snapshot, "perf/rollout_tokens_per_s"))),
                ("idle", share_of(metric_of(snapshot, "perf/rollout_idle_share"))),
                *spares,
            ],
        ),
        _node(
            "buffer",
            "Buffer",
            count_of(ledger.get("stored_groups")),
            f"of {count_of(capacity)} groups stored",
            [
                ("reserved", count_of(pending.get("reserved"))),
                ("dropped", count_of(_total(ledger.get("dropped")))),
                ("journal", _journal(ledger)),
            ],
            fill=fill_of(ledger.get("stored_groups"), capacity),
        ),
        _node(
            "learner",
            "Learner",
            count_of(snapshot.get("step")),
            f"of {count_of(snapshot.get('steps'))} steps",
            [
                ("state", str(learner.get("state") or DASH)),
                ("s/step", figure_of(metric_of(snapshot, "timing_s/step"))),
                ("tokens/s", count_of(metric_of(snapshot, "perf/learner_tokens_per_s"))),
                ("idle", share_of(metric_of(snapshot, "perf/learner_idle_share"))),
            ],
            fill=share_done(snapshot),
        ),
        _node(
            "weights",
            "Weights",
            count_of(metric_of(snapshot, "weights/published")),
            "newest version",
            [
                ("oldest", count_of(metric_of(snapshot, "weights/version"))),
                ("behind", _behind(snapshot)),
                ("transfer", seconds_of(metric_of(snapshot, "weights/transfer_s"))),
                ("swap", seconds_of(metric_of(snapshot, "weights/apply_s"))),
                ("failed", count_of(metric_of(snapshot, "weights/rounds_failed"))),
            ],
        ),
    ]


def _node(
    name: str,
    title: str,
    value: str,
    unit: str,
    figures: list[tuple[str, str]],
    fill: float | None = None,
) -> dict[str, Any]:
    rows = [list(pair) for pair in figures]
    return {"id": name, "title": title, "value": value, "unit": unit, "figures": rows, "fill": fill}


def edges_of(rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return what flows out of each box but the last, which flows back to the replicas."""
    flows = (
        ("prompts", "replicas", "issued", "groups/s"),
        ("replicas", "buffer", "arrived", "groups/s"),
        ("buffer", "learner", "trained", "groups/s"),
        ("learner", "weights", "published", "versions/s"),
    )
    return [
        {
            "from": source,
            "to": target,
            "rate": figure_of(rates.get(name)),
            "unit": unit,
            "is_moving": rates.get(name, 0.0) > 0.0,
        }
        for source, target, name, unit in flows
    ]


def _behind(snapshot: Snapshot) -> str:
    """Return by how many versions the oldest that a replica serves is behind the newest."""
    oldest, newest = metric_of(snapshot, "weights/version"), metric_of(snapshot, "weights/published")
    return DASH if oldest is None or newest is None else count_of(max(0.0, newest - oldest))


def _total(counts: Any) -> int | None:
    return sum(counts.values()) if isinstance(counts, Mapping) else None


def _journal(ledger: Mapping[str, Any]) -> str:
    journal = ledger.get("journal")
    return str(journal.get("kind") or journal.get("name") or "on") if isinstance(journal, Mapping) else DASH
