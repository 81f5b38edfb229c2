"""Readings of a run's snapshot for the page (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import msgspec

from asyncrl.control.diagnosis.waits import Diagnosis
from asyncrl.control.fleet.units import Stage
from asyncrl.control.snapshot import ServiceView, Snapshot, read_snapshot, values_of
from asyncrl.core.files.printable import printable_values
from asyncrl.core.states import SERVICE_ENDS, RunState, ServiceState
from asyncrl.core.status.service import kind_of
from asyncrl.page.figures import finite_values

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
DOUBTED_STAGES = (Stage.SUSPECT, Stage.DEAD, Stage.RETIRED)


def shown(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with each text as it may be shown, and without numbers that are none.

    A field whose number is none has its default, or 0 where it has none: one service's number takes nothing
    else from the page.
    """
    numbers = _with_numbers(snapshot)
    assert isinstance(numbers, Snapshot), "a struct stays what it is"
    cleaned = finite_values(printable_values(values_of(numbers)))
    assert isinstance(cleaned, dict), "a snapshot's values are an object"
    return read_snapshot(cleaned)


def _with_numbers(value: object) -> object:
    """Return structs, and those in their mappings and tuples, whose fields hold no number that is none."""
    if isinstance(value, msgspec.Struct):
        told = {one.name: _number_of(getattr(value, one.name), one) for one in _fields_of(type(value))}
        return msgspec.structs.replace(value, **told)
    if isinstance(value, Mapping):
        return {name: _with_numbers(one) for name, one in value.items()}
    return tuple(_with_numbers(one) for one in value) if isinstance(value, tuple) else value


_fields_of = cache(msgspec.structs.fields)
"""They are worked out anew at each call, which takes longer than the rest of a service's view."""


def _number_of(value: object, field: msgspec.structs.FieldInfo) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return 0.0 if field.required else field.default
    return _with_numbers(value)


def services_of(snapshot: Snapshot, kind: str) -> dict[str, ServiceView]:
    """Return the services of one kind by name."""
    return {name: one for name, one in snapshot.services.items() if kind_of(name) == kind}


def index_of(name: str) -> int:
    """Return the number in a service's name."""
    number = name.rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def metric_of(snapshot: Snapshot, name: str) -> float | None:
    """Return a metric of the newest row, None if the row lacks it or it is not finite."""
    value = snapshot.metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def share_done(snapshot: Snapshot) -> float | None:
    """Return which part of the run's steps is done."""
    return fill_of(snapshot.step, snapshot.steps)


def at_rest(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot of a run that is over without what is true of a living one only.

    What a service said last is not what it is: those that did not fail have ended, and none has a heartbeat.
    """
    ended = {
        name: msgspec.structs.replace(one, state=_end_of(one), stage=None, heartbeat_age_s=None)
        for name, one in snapshot.services.items()
    }
    return msgspec.structs.replace(snapshot, services=ended, health=None, phase="", bottleneck=Diagnosis())


def _end_of(service: ServiceView) -> ServiceState:
    return service.state if service.state in SERVICE_ENDS else ServiceState.ENDED


def fill_of(part: float | None, whole: float | None) -> float | None:
    """Return a part of a whole, from 0 to 1; None if either is not known."""
    return None if part is None or not whole else max(0.0, min(1.0, part / whole))


def state_of(service: ServiceView) -> str:
    """Return a service's own word, unless the supervisor knows better."""
    return str(service.stage if service.stage in DOUBTED_STAGES else service.state)


def tone_of(state: str) -> str:
    """Return how a state looks: good, bad, or busy for all that pass.

    >>> tone_of("READY"), tone_of("SYNCING"), tone_of("DEAD")
    ('good', 'busy', 'bad')
    """
    if state == ServiceState.SUSPECT:
        return "warn"
    return "good" if state in GOOD_STATES else "bad" if state in BAD_STATES else "busy"
