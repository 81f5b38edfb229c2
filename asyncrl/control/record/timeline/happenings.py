"""Sync rounds, from the coordinator's journal, and the run's events (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.control.record.timeline.spans import Moment, Span, Timeline, Window
from asyncrl.core.files.sync_records import BlameRecord, Entry, RoundRecord, StartRecord

COORDINATOR = "weight_sync.0"
_BY_NAME = ("time", "kind", "service", "text")


def rounds_in(entries: Iterable[Entry], window: Window) -> Timeline:
    """Return the rounds that fall into the window, in lanes as the protocol has them, and who was blamed."""
    spans, moments = [], []
    for entry in entries:
        if isinstance(entry, RoundRecord) and window.meets(entry.time - entry.seconds, entry.time):
            about = {key: getattr(entry, key) for key in ("step", "num_bytes", "parts", "cause")}
            name = f"version {entry.number}" + (f": {entry.cause}" if entry.cause else "")
            lane = f"rounds ({entry.lane})"
            spans.append(Span(COORDINATOR, lane, name, entry.time - entry.seconds, entry.time, about))
        elif isinstance(entry, BlameRecord) and window.holds(entry.time):
            moments.append(Moment(COORDINATOR, f"blames {entry.culprit}: {entry.cause}", entry.time))
        elif isinstance(entry, StartRecord) and window.holds(entry.time):
            moments.append(Moment(COORDINATOR, "start", entry.time, {"token": entry.token}))
    return Timeline(window, spans, moments)


def events_in(events: Iterable[Mapping[str, Any]], window: Window) -> Timeline:
    """Return the run's events of the window: restarts, findings of the guard, scaling, stalls."""
    moments = [
        Moment(
            str(event.get("service") or "run"),
            f"{event['kind']}: {event.get('text', '')}",
            float(event["time"]),
            {key: value for key, value in event.items() if key not in _BY_NAME},
        )
        for event in events
        if window.holds(float(event["time"]))
    ]
    return Timeline(window, (), moments)
