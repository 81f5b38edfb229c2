"""Spans, moments and counts on the wall clock, how spans are laid beside one another, and events (pure).

Invariant: of `lay_out`, no two spans of one lane overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weight_sync.sync_records import BlameRecord, Entry, RoundRecord, StartRecord


@dataclass(frozen=True)
class Window:
    """From `start_s` to `end_s`, seconds since the epoch."""

    start_s: float
    end_s: float

    def meets(self, start_s: float, end_s: float) -> bool:
        """Tell whether an interval has a part in the window."""
        return start_s < self.end_s and end_s > self.start_s

    def holds(self, time_s: float) -> bool:
        """Tell whether a moment is in the window."""
        return self.start_s <= time_s <= self.end_s


@dataclass(frozen=True)
class Span:
    """Interval of time in a service.

    Attributes:
        service: Its service, such as `rollout.1`.
        lane: Part of the service, such as `stages`; spans of one lane that overlap get rows of their own.
    """

    service: str
    lane: str
    name: str
    start_s: float
    end_s: float
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """Something that took no time."""

    service: str
    name: str
    time_s: float
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Count:
    """A number that holds from `time_s` on."""

    service: str
    name: str
    time_s: float
    value: float


@dataclass(frozen=True)
class Timeline:
    """All of a window."""

    window: Window
    spans: Sequence[Span] = ()
    moments: Sequence[Moment] = ()
    counts: Sequence[Count] = ()


def clip(spans: Iterable[Span], window: Window) -> list[Span]:
    """Return the parts of spans that lie in the window."""
    return [
        replace(span, start_s=max(span.start_s, window.start_s), end_s=min(span.end_s, window.end_s))
        for span in spans
        if window.meets(span.start_s, span.end_s)
    ]


def lay_out(spans: Iterable[Span]) -> dict[tuple[str, str], list[list[Span]]]:
    """Return for each (service, lane) its rows of spans, as few as there are at a time."""
    found: dict[tuple[str, str], list[list[Span]]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        rows = found[span.service, span.lane]
        free = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return dict(found)


def join(spans: Iterable[Span], lane: str, name: str) -> list[Span]:
    """Return one span for each stretch of time in which a service has any of `spans`."""
    joined: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_s):
        known = joined[span.service]
        if known and span.start_s <= known[-1].end_s:
            start_s, end_s = known[-1].start_s, max(known[-1].end_s, span.end_s)
            known[-1] = Span(span.service, lane, name, start_s, end_s)
        else:
            known.append(Span(span.service, lane, name, span.start_s, span.end_s))
    return [span for known in joined.values() for span in known]


COORDINATOR = "weight_sync.0"
_BY_NAME = ("time", "kind", "service", "text")


def rounds_in(entries: Iterable[Entry], window: Window) -> Timeline:
    """Return the rounds that fall into the window, in lanes as the protocol has them, and who was blamed."""
    spans, moments = [], []
    for entry in entries:
        if isinstance(entry, RoundRecord) and window.meets(entry.time - entry.seconds, entry.time):
            about = {key: getattr(entry, key) for key in ("step", "num_bytes", "parts", "holder", "cause")}
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
