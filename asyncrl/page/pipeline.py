"""The boxes of the pipeline from left to right, and what flows between them (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from asyncrl.control.snapshot import Snapshot
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import LEARNER
from asyncrl.page.figures import DASH, count_of, figure_of, seconds_of, share_of
from asyncrl.page.snapshot import fill_of, metric_of, services_of, share_done, state_of


class Node(TypedDict):
    """A box: its figures as (name, text), and how full it is."""

    id: str
    title: str
    value: str
    unit: str
    figures: list[list[str]]
    fill: float | None


Edge = TypedDict("Edge", {"from": str, "to": str, "rate": str, "unit": str, "is_moving": bool})
"""Flow out of a box."""


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


def counters_of(snapshot: Snapshot) -> dict[str, float]:
    """Return what rates are made of; all of it only rises while nothing is replaced."""
    found: dict[str, float] = {}
    if (ledger := snapshot.ledger) is not None:
        arrived = float(ledger.trained + ledger.pending.num_arrived + ledger.num_dropped)
        found = {"issued": float(ledger.issued), "arrived": arrived, "trained": float(ledger.trained)}
    if (published := metric_of(snapshot, "weights/published")) is not None:
        found["published"] = published
    if snapshot.step:
        found["steps"] = float(snapshot.step)
    return found


def nodes_of(snapshot: Snapshot) -> list[Node]:
    """Return the boxes from left to right."""
    ledger, capacity = snapshot.ledger, snapshot.ready_groups
    pending = ledger.pending if ledger else None
    stored = ledger.stored_groups if ledger else None
    rollouts = services_of(snapshot, "rollout")
    replicas = {name: one for name, one in rollouts.items() if not one.standby}
    spares = [("standby", str(len(rollouts) - len(replicas)))] if len(rollouts) > len(replicas) else []
    ready = sum(state_of(replica) == ServiceState.READY for replica in replicas.values())
    learner = snapshot.services.get(LEARNER)
    return [
        _node(
            "prompts",
            "Prompts",
            count_of(ledger.prompts_drawn if ledger else None),
            "drawn",
            [
                ("open", count_of(ledger.open if ledger else None)),
                ("given up", count_of(ledger.given_up if ledger else None)),
                ("pass", count_of(metric_of(snapshot, "training/epoch"))),
            ],
        ),
        _node(
            "replicas",
            "Replicas",
            f"{ready}/{len(replicas)}" if replicas else DASH,
            "ready",
            [
                ("leased", count_of(pending.leased if pending else None)),
                ("tokens/s", count_of(metric_of(snapshot, "perf/rollout_tokens_per_s"))),
                ("idle", share_of(metric_of(snapshot, "perf/rollout_idle_share"))),
                *spares,
            ],
        ),
        _node(
            "buffer",
            "Buffer",
            count_of(stored),
            f"of {count_of(capacity)} groups stored",
            [
                ("reserved", count_of(pending.reserved if pending else None)),
                ("dropped", count_of(ledger.num_dropped if ledger else None)),
                ("journal", ledger.journal.kind if ledger else DASH),
            ],
            fill=fill_of(stored, capacity),
        ),
        _node(
            "learner",
            "Learner",
            count_of(snapshot.step),
            f"of {count_of(snapshot.steps)} steps",
            [
                ("state", str(learner.state) if learner else DASH),
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
                ("probe gap", figure_of(metric_of(snapshot, "weights/probe_gap_max"))),
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
) -> Node:
    rows = [list(pair) for pair in figures]
    return {"id": name, "title": title, "value": value, "unit": unit, "figures": rows, "fill": fill}


def edges_of(rates: Mapping[str, float]) -> list[Edge]:
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
