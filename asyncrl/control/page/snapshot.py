"""Reading a run's snapshot, in which anything may be missing (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncrl.states import SERVICE_ENDS, ServiceState

Snapshot = Mapping[str, Any]

DOUBTED_STAGES = (ServiceState.SUSPECT, ServiceState.DEAD, ServiceState.RETIRED)


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Return a mapping, empty where there is none."""
    return value if isinstance(value, Mapping) else {}


def services_of(snapshot: Snapshot, kind: str) -> dict[str, Mapping[str, Any]]:
    """Return the services of one kind by name."""
    services = mapping_of(snapshot.get("services"))
    return {name: mapping_of(one) for name, one in services.items() if name.split(".")[0] == kind}


def index_of(name: str) -> int:
    """Return the number in a service's name."""
    number = name.rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def metric_of(snapshot: Snapshot, name: str) -> float | None:
    """Return a metric of the newest row, None if the row lacks it or it is not finite."""
    value = mapping_of(snapshot.get("metrics")).get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def share_done(snapshot: Snapshot) -> float | None:
    """Return which part of the run's steps is done."""
    return fill_of(snapshot.get("step"), snapshot.get("steps"))


def at_rest(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot of a run that is over without what is true of a living one only.

    What a service said last is not what it is: those that did not fail have ended, and none has a heartbeat.
    """
    services = {name: mapping_of(one) for name, one in mapping_of(snapshot.get("services")).items()}
    ended = {
        name: {
            **one,
            "state": one["state"] if one.get("state") in SERVICE_ENDS else ServiceState.ENDED,
            "stage": "",
        }
        | {"heartbeat_age_s": None}
        for name, one in services.items()
    }
    return {**snapshot, "services": ended, "health": "", "phase": "", "bottleneck": {}}


def _end_of(service: Mapping[str, Any]) -> str:
    return str(service["state"] if service.get("state") in SERVICE_ENDS else ServiceState.ENDED)


def fill_of(part: Any, whole: Any) -> float | None:
    """Return a part of a whole, from 0 to 1; None if either is not known."""
    return None if part is None or not whole else max(0.0, min(1.0, part / whole))


def state_of(service: Mapping[str, Any]) -> str:
    """Return a service's own word, unless the supervisor knows better; empty if neither says anything."""
    stage = str(service.get("stage") or "")
    return stage if stage in DOUBTED_STAGES else str(service.get("state") or "")
