"""Sync rounds, from the coordinator's journal, and the run's events (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.control.record.timeline.spans import Moment, Span, Timeline, Window

COORDINATOR = "weight_sync.0"
_BY_NAME = ("time", "kind", "service", "text")


def rounds_in(lines: Iterable[Mapping[str, Any]], window: Window) -> Timeline:
    """Return the rounds that fall into the window, in lanes as the protocol has them, and who was blamed."""
    spans, moments = [], []
    for line in lines:
        time_s = float(line["time"])
        if line["kind"] == "round" and window.meets(time_s - line["seconds"], time_s):
            about = {key: line[key] for key in ("step", "num_bytes", "parts", "cause")}
            name = f"version {line['number']}" + (f": {line['cause']}" if line["cause"] else "")
            lane = f"rounds ({line['lane']})"
            spans.append(Span(COORDINATOR, lane, name, time_s - line["seconds"], time_s, about))
        elif line["kind"] == "blame" and window.holds(time_s):
            moments.append(Moment(COORDINATOR, f"blames {line['culprit']}: {line['cause']}", time_s))
        elif line["kind"] == "start" and window.holds(time_s):
            moments.append(Moment(COORDINATOR, "start", time_s, {"token": line["token"]}))
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
