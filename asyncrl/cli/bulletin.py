"""Lines that tell a terminal what keeps a run from its next step, or from learning, once each (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.obstacle import sentence_of

Snapshot = Mapping[str, Any]

TOLD_KINDS = ("obstacle", "exit", "stall", "guard", "journal", "checkpoint")
"""Kinds of events that keep a run from its next step or from learning, or that end an obstacle."""


class Bulletin:
    """Turns snapshots into lines.

    >>> bulletin = Bulletin()
    >>> found = {"service": "buffer.0", "reason": "no space left on device", "count": 1}
    >>> bulletin.lines({"obstacles": [found], "events": []})
    ['! buffer.0: no space left on device']
    >>> bulletin.lines({"obstacles": [found], "events": []})
    []
    """

    def __init__(self) -> None:
        self._told_until: float | None = None

    def lines(self, snapshot: Snapshot) -> list[str]:
        """Return what is new since the last snapshot; at the first one, what holds."""
        if "events" not in snapshot:
            return []
        events = [event for event in snapshot["events"] if event.get("kind") in TOLD_KINDS]
        newest = max((float(event.get("time") or 0.0) for event in events), default=0.0)
        if self._told_until is None:
            self._told_until = newest
            held_up = snapshot.get("obstacles") or []
            return [line_of(one["service"], sentence_of(one["reason"], one["count"])) for one in held_up]
        new = [event for event in events if float(event.get("time") or 0.0) > (self._told_until or 0.0)]
        self._told_until = max(self._told_until, newest)
        return [line_of(str(event.get("service")), str(event.get("text"))) for event in new]


def line_of(service: str, text: str) -> str:
    """Return what happened to a service as a line that stands out."""
    return f"! {text}" if text.startswith(service) else f"! {service}: {text}"
