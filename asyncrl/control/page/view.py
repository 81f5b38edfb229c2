"""View model of the page: a run's snapshot as plain values and finished texts (pure).

Owns every word and figure of the page but those of models and services, which it passes on as data, with
unprintable characters written out. The page's script only puts texts in their places. A figure that the
snapshot lacks is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.control.page.figures import DASH, count_of, duration_of, figure_of, finite_values, share_of
from asyncrl.control.page.pipeline import edges_of, node_of, nodes_of
from asyncrl.control.page.snapshot import (
    Snapshot,
    at_rest,
    index_of,
    mapping_of,
    metric_of,
    share_done,
    state_of,
)
from asyncrl.printable import printable_values
from asyncrl.states import RUN_ENDS, RunState, ServiceState

MAX_EVENTS = 50
MAX_LAG_BARS = 33
LAG_SHARE = "staleness/lag_share/"
OPEN_STATES = ("issued", "leased", "stored", "reserved")
GOOD_STATES = (
    ServiceState.READY,
    ServiceState.PINNED,
    ServiceState.ENDED,
    RunState.RUNNING,
    RunState.FINISHED,
    RunState.STOPPED,
)
BAD_STATES = (
    *(ServiceState.DEAD, ServiceState.RETIRED, ServiceState.FAILED, ServiceState.SILENT),
    *(RunState.FAILED, RunState.SILENT),
)
TONES = {
    "exit": "bad",
    "stall": "bad",
    "obstacle": "bad",
    "guard": "warn",
    "journal": "bad",
    "pause": "warn",
    "restart": "warn",
    "ready": "good",
}
"""Of kinds of events."""
LEAVING = (RunState.STOPPING, *RUN_ENDS)


def view_of(snapshot: Snapshot, rates: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return all that the page shows but curves and rollouts; `asyncrl status` prints the same.

    Args:
        snapshot: `Supervisor.status()`.
        rates: What flows between the boxes of the pipeline, by `pipeline.counters_of`.
    """
    snapshot = finite_values(printable_values(snapshot))
    ledger = mapping_of(snapshot.get("ledger"))
    state = str(snapshot.get("state") or DASH)
    if state in RUN_ENDS:
        snapshot, rates = at_rest(snapshot), None
    health = str(snapshot.get("health") or "")
    return {
        "run": str(snapshot.get("run") or "run"),
        "state": state,
        "tone": "bad" if health == "degraded" else tone_of(state),
        "health": health,
        "is_leaving": state in LEAVING,
        "phase": str(snapshot.get("phase") or ""),
        "error": str(snapshot.get("error") or ""),
        "step": count_of(snapshot.get("step")),
        "steps": count_of(snapshot.get("steps")),
        "progress": share_done(snapshot),
        "accuracy": share_of(snapshot.get("accuracy")),
        "time_left": _time_left(snapshot),
        "resumed": resumed_of(snapshot),
        "place": _place(snapshot),
        "paused": bool(snapshot.get("paused")),
        "bottleneck": _bottleneck(mapping_of(snapshot.get("bottleneck")), state),
        "obstacles": _obstacles(snapshot, state),
        "nodes": nodes_of(snapshot, ledger),
        "edges": edges_of(rates or {}),
        "account": _account(ledger),
        "lag": _lag(snapshot),
        "services": _services(snapshot),
        "events": [_event(event) for event in reversed(list(snapshot.get("events") or [])[-MAX_EVENTS:])],
    }


def tone_of(state: str) -> str:
    """Return how a state looks: good, bad, or busy for all that pass.

    >>> tone_of("READY"), tone_of("SYNCING"), tone_of("DEAD")
    ('good', 'busy', 'bad')
    """
    if state == ServiceState.SUSPECT:
        return "warn"
    return "good" if state in GOOD_STATES else "bad" if state in BAD_STATES else "busy"


def _bottleneck(found: Mapping[str, Any], state: str) -> dict[str, str]:
    """Return who holds a run up; nobody does once it is on its way out."""
    if state in LEAVING:
        title = "The run is stopping." if state == RunState.STOPPING else f"The run has {state}."
        return {"node": "", "title": title, "why": "", "wait": ""}
    who, waits_for = str(found.get("who") or ""), str(found.get("learner_waits_for") or "")
    return {
        "node": node_of(who),
        "title": f"Bottleneck: {_spoken(who)}." if who else "No bottleneck.",
        "why": _sentence(str(found.get("why") or "")),
        "wait": f"The learner waits for {_spoken(waits_for)}." if waits_for else "",
    }


def _obstacles(snapshot: Snapshot, state: str) -> list[dict[str, Any]]:
    """Return what keeps a run from its next step, the gravest first; nothing once it is on its way out."""
    found = [] if state in LEAVING else [mapping_of(one) for one in snapshot.get("obstacles") or []]
    return [
        {
            "node": node_of(str(one.get("service") or "")),
            "service": str(one.get("service") or ""),
            "text": _sentence(str(one.get("reason") or "")),
            "count": f"{one['count']} times in a row" if (one.get("count") or 1) > 1 else "",
            "since": float(one.get("since") or 0.0),
            "tone": "bad" if one.get("blocks") else "warn",
        }
        for one in found
    ]


def _spoken(who: Any) -> str:
    """Return a service or a role as one says it."""
    words = {"rollout": "the replicas", "weight_sync": "weight sync", "reward": "rewards"}
    return words.get(str(who or ""), str(who or ""))


def _sentence(text: str) -> str:
    if not text:
        return DASH
    first = text.split(" ")[0]
    is_name = "." in first or first.lower() != first  # of a service or a library
    return f"{text[:1] if is_name else text[:1].upper()}{text[1:].rstrip('.')}."


def _time_left(snapshot: Snapshot) -> str:
    left_s = snapshot.get("time_left_s")
    return "" if left_s is None or snapshot.get("state") != RunState.RUNNING else duration_of(left_s)


def _place(snapshot: Snapshot) -> str:
    """Return where the run's configuration and logs are; empty while that is not known."""
    folder = snapshot.get("folder")
    if not folder:
        return ""
    return f"Run {snapshot.get('run_id')} in {folder}: configuration resolved.yaml, logs in logs/"


def resumed_of(snapshot: Snapshot) -> str:
    """Return where a resumed run goes on, empty while that and the ledger's account are not known."""
    residue = mapping_of(snapshot.get("ledger")).get("residue")
    if residue is None or not (snapshot.get("resumed_step") or snapshot.get("torn")):
        return ""
    torn = "".join(f"; {sentence}" for sentence in snapshot.get("torn") or ())
    return f"resumed at step {snapshot.get('resumed_step') or 0}, residue {residue}{torn}"


# --- the account ----------------------------------------------------------------------------


def _account(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """Return both laws: what is on the left, the parts on the right, and what does not add up."""
    residue = ledger.get("residue")
    dropped = mapping_of(ledger.get("dropped"))
    pending = mapping_of(ledger.get("pending"))
    states = [(state, pending.get(state), "pending") for state in OPEN_STATES]
    groups = [("trained", ledger.get("trained"), "trained")]
    groups += [(f"dropped: {reason}", count, "dropped") for reason, count in dropped.items()] or [
        ("dropped", 0 if ledger else None, "dropped")
    ]
    prompts = [
        ("trained", ledger.get("trained"), "trained"),
        ("given up", ledger.get("given_up"), "dropped"),
        ("open", ledger.get("open"), "pending"),
    ]
    return {
        "residue": count_of(residue),
        "tone": "busy" if residue is None else "bad" if residue else "good",
        "laws": [
            _law("groups issued", ledger.get("issued"), groups + states),
            _law("prompts drawn", ledger.get("prompts_drawn"), prompts),
        ],
    }


def _law(name: str, total: Any, parts: list[tuple[str, Any, str]]) -> dict[str, Any]:
    whole = float(total or 0)
    return {
        "name": name,
        "total": count_of(total),
        "parts": [
            {
                "name": part,
                "count": count_of(count),
                "share": float(count or 0) / whole if whole else 0.0,
                "kind": kind,
            }
            for part, count, kind in parts
        ],
    }


# --- staleness ------------------------------------------------------------------------------


def _lag(snapshot: Snapshot) -> dict[str, Any]:
    """Return the newest step's histogram: the share of its tokens at each lag, up to the bound."""
    max_lag = int(snapshot.get("max_lag") or 0)
    num_bars = min(max_lag + 1, MAX_LAG_BARS)
    shares = [metric_of(snapshot, f"{LAG_SHARE}{lag}") for lag in range(num_bars)]
    return {
        "max_lag": max_lag,
        "mean": figure_of(metric_of(snapshot, "staleness/lag_mean")),
        "max": count_of(metric_of(snapshot, "staleness/lag_max_trained")),
        "masked": share_of(metric_of(snapshot, "staleness/masked_share")),
        "bars": []
        if all(share is None for share in shares)
        else [
            {"lag": str(lag), "share": share or 0.0, "text": share_of(share or 0.0)}
            for lag, share in enumerate(shares)
        ],
    }


# --- services and events --------------------------------------------------------------------


def _services(snapshot: Snapshot) -> list[dict[str, Any]]:
    services = mapping_of(snapshot.get("services"))
    replicas = (mapping_of(one) for name, one in services.items() if name.startswith("rollout."))
    told = [replica.get("version") or 0 for replica in replicas]
    newest = max(metric_of(snapshot, "weights/published") or 0, *told, 0)  # a row is older than a status
    return [
        _service(name, mapping_of(services[name]), newest)
        for name in sorted(services, key=lambda name: (_ORDER.get(name.split(".")[0], 9), index_of(name)))
    ]


_ORDER = {"rollout": 0, "learner": 1, "buffer": 2, "weight_sync": 3, "publisher": 4, "receiver": 5}


def _service(name: str, service: Mapping[str, Any], newest: float) -> dict[str, Any]:
    state, version = state_of(service) or DASH, service.get("version")
    is_replica = name.startswith("rollout.")
    behind = "" if not (is_replica and version and newest) else _behind(newest - version)
    age = service.get("heartbeat_age_s")
    return {
        "name": name,
        "is_replica": is_replica,
        "state": state + (" (standby)" if service.get("standby") else ""),
        "tone": tone_of(state),
        "version": count_of(version or None) if is_replica else "",
        "behind": behind,
        "heartbeat": DASH if age is None else f"{age:.1f} s",
        "restarts": count_of(service.get("restarts")),
        "gateway": str(service.get("gateway") or ""),
    }


def _behind(versions: float) -> str:
    return "newest" if versions <= 0 else f"{versions:.0f} behind"


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(event.get("kind") or "")
    tone = TONES.get(kind, "busy")
    return {
        "time": float(event.get("time") or 0.0),
        "kind": kind,
        "service": str(event.get("service") or ""),
        "text": str(event.get("text") or ""),
        "tone": tone,
    }
