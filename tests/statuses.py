"""Statuses and snapshots of tests, from the few values that a test is about; all others are zero or empty."""

from __future__ import annotations

import enum
import json
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.control.snapshot import HeadWord, LedgerView, ServiceView, Snapshot, read_snapshot, values_of
from asyncrl.control.supervisor import Supervisor
from asyncrl.core.obstacle import Obstacle
from asyncrl.core.status.replica import (
    EngineStatus,
    GatewayStatus,
    ReplicaStatus,
    RewardStatus,
    ShapingStatus,
)
from asyncrl.core.status.service import (
    FileJournalStatus,
    JournalStatus,
    MemberStatus,
    RedisJournalStatus,
    ServiceStatus,
    kind_of,
)
from asyncrl.core.status.statuses import KINDS, Statuses

JOURNALS = {"none": JournalStatus, "file": FileJournalStatus, "redis": RedisJournalStatus}
PARTS: Mapping[str, tuple[type[msgspec.Struct], Mapping[str, str]]] = {
    "engine": (EngineStatus, {name: name for name in EngineStatus.__struct_fields__}),
    "reward": (
        RewardStatus,
        {"reward_parts": "parts", "reward_errors": "errors", "reward_sources": "sources"},
    ),
    "shaping": (ShapingStatus, {name: name for name in ShapingStatus.__struct_fields__}),
    "gateway": (GatewayStatus, {"gateway": "url", "overridden": "overridden"}),
}
"""Parts of a replica's status, and what a test calls their fields."""


def status_of(name: str, values: Mapping[str, Any] | None = None, **more: Any) -> ServiceStatus:
    """Return the status of a service; with what any service may say only, it has said nothing else.

    A field that is none of its kind is refused.
    """
    values = {"state": "READY", **(values or {}), **more}
    kind = KINDS.get(kind_of(name), ServiceStatus)
    if set(values) <= set(ServiceStatus.__struct_fields__):
        kind = ServiceStatus
    if kind is ReplicaStatus:
        values = _with_parts(values)
    return msgspec.convert(filled(kind, values), kind)


def statuses_of(found: Mapping[str, Mapping[str, Any]]) -> Statuses:
    """Return the statuses of some services by name."""
    return Statuses({name: status_of(name, values) for name, values in found.items()})


def snapshot_of(values: Mapping[str, Any] | None = None, **more: Any) -> Snapshot:
    """Return a snapshot from some of its JSON: the head's word where that holds no more."""
    known = {**(values or {}), **more}
    if known and set(known) <= set(HeadWord.TOLD):
        return msgspec.convert(known, HeadWord)
    if known.get("ledger"):
        known["ledger"] = filled(LedgerView, known["ledger"])
    services = known.get("services") or {}
    known["services"] = {name: filled(ServiceView, service) for name, service in services.items()}
    known["obstacles"] = [filled(Obstacle, one) for one in known.get("obstacles") or []]
    return read_snapshot(known)


def told_by(supervisor: Supervisor) -> dict[str, Any]:
    """Return the JSON of a supervisor's snapshot, as the command line prints it."""
    found: dict[str, Any] = json.loads(json.dumps(values_of(supervisor.snapshot())))
    return found


def filled(kind: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with those that `kind` requires and that are not there."""
    known = dict(values)
    if "journal" in kind.__struct_fields__:
        told = known.get("journal", {"kind": "none"})
        known["journal"] = {**filled(JOURNALS[told["kind"]], told), "kind": told["kind"]}
    if "members" in known:
        known["members"] = {name: filled(MemberStatus, one) for name, one in known["members"].items()}
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in known:
            known[field.name] = _zero_of(field.type)
    return known


def _with_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a replica's values with those of its parts where they belong."""
    known = dict(values)
    if "idle_s" in known:
        known.setdefault("idle_by_cause", {"lease": known["idle_s"]})
        del known["idle_s"]
    for part, (kind, names) in PARTS.items():
        told = {field: known.pop(name) for name, field in names.items() if name in known}
        if told:
            known[part] = filled(kind, told)
    return known


def _zero_of(kind: Any) -> Any:
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in options:
        return None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind)).value
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return filled(kind, {})
    if origin is tuple:
        return []
    return {} if origin is not None else kind()
