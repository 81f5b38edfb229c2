"""View model of the page: a run's snapshot as plain values and finished texts (pure).

Owns every word and figure of the page but those of models and services, which it passes on as data, with
unprintable characters written out. The page's script only puts texts in their places. A figure that the
snapshot lacks is a dash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from asyncrl.control.snapshot import LedgerView, Snapshot
from asyncrl.core.obstacle import Obstacle as RunObstacle
from asyncrl.core.states import RUN_ENDS, RunState
from asyncrl.core.status.service import PendingTickets
from asyncrl.page.figures import DASH, count_of, duration_of, figure_of, share_of
from asyncrl.page.fleet import Fleet
from asyncrl.page.picture import Account, Bar, Event, Lag, Law, Obstacle, Pace, View
from asyncrl.page.pipeline import edges_of, node_of, nodes_of
from asyncrl.page.snapshot import at_rest, metric_of, share_done, shown, tone_of

MAX_EVENTS, MAX_OBSTACLES = 50, 24
MAX_LAG_BARS = 33
LAG_SHARE = "staleness/lag_share/"
OPEN_STATES = PendingTickets.__struct_fields__
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


def view_of(snapshot: Snapshot, rates: Mapping[str, float] | None = None, *, is_whole: bool = False) -> View:
    """Return all that the page shows but curves and rollouts; `asyncrl status` prints the same.

    Args:
        snapshot: Of the supervisor.
        rates: Flows between the boxes of the pipeline, by `pipeline.counters_of`.
        is_whole: Every service of a large fleet has a row, and it has no groups.
    """
    snapshot = shown(snapshot)
    state = snapshot.state
    if state in RUN_ENDS:
        snapshot, rates = at_rest(snapshot), None
    fleet = Fleet(snapshot)
    rows = fleet.all_rows() if is_whole else fleet.rows()
    return {
        "run": snapshot.run or "run",
        "state": str(state or DASH),
        "tone": "bad" if snapshot.is_degraded else tone_of(str(state)),
        "health": str(snapshot.health or ""),
        "is_leaving": state in LEAVING,
        "phase": snapshot.phase,
        "error": snapshot.error or "",
        "step": count_of(snapshot.step),
        "steps": count_of(snapshot.steps),
        "progress": share_done(snapshot),
        "accuracy": share_of(snapshot.accuracy),
        "time_left": _time_left(snapshot),
        "resumed": resumed_of(snapshot),
        "place": _place(snapshot),
        "paused": snapshot.paused,
        "bottleneck": _pace(snapshot),
        "obstacles": _obstacles(snapshot),
        "nodes": nodes_of(snapshot),
        "edges": edges_of(rates or {}),
        "account": _account(snapshot.ledger),
        "lag": _lag(snapshot),
        "services": rows,
        "groupings": [] if is_whole else fleet.groupings(),
        "num_hidden": len(snapshot.services) - len(rows),
        "events": [_event(event) for event in reversed(snapshot.events[-MAX_EVENTS:])],
    }


def _pace(snapshot: Snapshot) -> Pace:
    """Return who holds a run up; nobody does once it is on its way out."""
    found, state = snapshot.bottleneck, snapshot.state
    if state in LEAVING:
        title = "The run is stopping." if state == RunState.STOPPING else f"The run has {state}."
        return {"node": "", "title": title, "why": "", "wait": ""}
    who, waits_for = found.who, found.learner_waits_for
    return {
        "node": node_of(who),
        "title": f"Bottleneck: {_spoken(who)}." if who else "No bottleneck.",
        "why": _sentence(found.why),
        "wait": f"The learner waits for {_spoken(waits_for)}." if waits_for else "",
    }


def _obstacles(snapshot: Snapshot) -> list[Obstacle]:
    """Return what keeps a run from its next step, the gravest first; nothing once it is on its way out."""
    found = () if snapshot.state in LEAVING else snapshot.obstacles
    told: list[Obstacle] = [
        {
            "node": node_of(one.service),
            "service": one.service,
            "text": _sentence(one.reason),
            "count": f"{one.count} times in a row" if one.count > 1 else "",
            "since": one.since,
            "tone": "bad" if one.blocks else "warn",
        }
        for one in found[:MAX_OBSTACLES]
    ]
    return [*told, *_other_obstacles(found[MAX_OBSTACLES:])]


def _other_obstacles(found: Sequence[RunObstacle]) -> list[Obstacle]:
    """Return one for all that have no place, with how many there are of each cause."""
    if not found:
        return []
    counts = Counter(one.cause.value for one in found).most_common()
    text = ", ".join(f"{cause} {count}" for cause, count in counts)
    tone = "bad" if any(one.blocks for one in found) else "warn"
    since = min(one.since for one in found)
    return [
        {"node": "", "service": f"{len(found)} more", "text": text, "count": "", "since": since, "tone": tone}
    ]


def _spoken(who: str) -> str:
    """Return a service or a role as one says it."""
    words = {"rollout": "the replicas", "weight_sync": "weight sync", "reward": "rewards"}
    return words.get(who, who)


def _sentence(text: str) -> str:
    if not text:
        return DASH
    first = text.split(" ")[0]
    is_name = "." in first or first.lower() != first  # of a service or a library
    return f"{text[:1] if is_name else text[:1].upper()}{text[1:].rstrip('.')}."


def _time_left(snapshot: Snapshot) -> str:
    left_s = snapshot.time_left_s
    return "" if left_s is None or snapshot.state != RunState.RUNNING else duration_of(left_s)


def _place(snapshot: Snapshot) -> str:
    """Return where the run's configuration and logs are; empty while that is not known."""
    if not snapshot.folder:
        return ""
    return f"Run {snapshot.run_id} in {snapshot.folder}: configuration resolved.yaml, logs in logs/"


def resumed_of(snapshot: Snapshot) -> str:
    """Return where a resumed run goes on, empty while that and the ledger's account are not known."""
    if snapshot.ledger is None or not (snapshot.resumed_step or snapshot.torn):
        return ""
    torn = "".join(f"; {sentence}" for sentence in snapshot.torn)
    return f"resumed at step {snapshot.resumed_step}, residue {snapshot.ledger.residue}{torn}"


# --- the account ----------------------------------------------------------------------------


Part = tuple[str, int | None, str]
"""Its name, how many, and of which kind they are."""


def _account(ledger: LedgerView | None) -> Account:
    """Return both laws: what is on the left, the parts on the right, and what does not add up."""
    residue = ledger.residue if ledger else None
    pending = msgspec.structs.asdict(ledger.pending) if ledger else dict.fromkeys(OPEN_STATES)
    states: list[Part] = [(state, pending[state], "pending") for state in OPEN_STATES]
    trained: Part = ("trained", ledger.trained if ledger else None, "trained")
    dropped = ledger.dropped if ledger else {}
    groups: list[Part] = [(f"dropped: {reason}", count, "dropped") for reason, count in dropped.items()]
    prompts: list[Part] = [
        trained,
        ("given up", ledger.given_up if ledger else None, "dropped"),
        ("open", ledger.open if ledger else None, "pending"),
    ]
    none_dropped: Part = ("dropped", 0 if ledger else None, "dropped")
    return {
        "residue": count_of(residue),
        "tone": "busy" if residue is None else "bad" if residue else "good",
        "laws": [
            _law(
                "groups issued",
                ledger.issued if ledger else None,
                [trained, *(groups or [none_dropped]), *states],
            ),
            _law("prompts drawn", ledger.prompts_drawn if ledger else None, prompts),
        ],
    }


def _law(name: str, total: int | None, parts: list[Part]) -> Law:
    return {
        "name": name,
        "total": count_of(total),
        "parts": [
            {
                "name": part,
                "count": count_of(count),
                "share": (count or 0) / total if total else 0.0,
                "kind": kind,
            }
            for part, count, kind in parts
        ],
    }


# --- staleness ------------------------------------------------------------------------------


def _lag(snapshot: Snapshot) -> Lag:
    """Return the newest step's histogram: the share of its tokens at each lag, up to the bound."""
    max_lag = snapshot.max_lag or 0
    num_bars = min(max_lag + 1, MAX_LAG_BARS)
    shares = [metric_of(snapshot, f"{LAG_SHARE}{lag}") for lag in range(num_bars)]
    is_known = any(share is not None for share in shares)
    return {
        "max_lag": max_lag,
        "mean": figure_of(metric_of(snapshot, "staleness/lag_mean")),
        "max": count_of(metric_of(snapshot, "staleness/lag_max_trained")),
        "masked": share_of(metric_of(snapshot, "staleness/masked_share")),
        "bars": [_bar(lag, share or 0.0) for lag, share in enumerate(shares)] if is_known else [],
    }


def _bar(lag: int, share: float) -> Bar:
    return {"lag": str(lag), "share": share, "text": share_of(share)}


# --- events --------------------------------------------------------------------


def _event(event: Mapping[str, object]) -> Event:
    kind, time = str(event.get("kind") or ""), event.get("time")
    return {
        "time": float(time) if isinstance(time, int | float) else 0.0,
        "kind": kind,
        "service": str(event.get("service") or ""),
        "text": str(event.get("text") or ""),
        "tone": TONES.get(kind, "busy"),
    }
