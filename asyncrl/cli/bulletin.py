"""Lines that tell a terminal what keeps a run from its next step, or from learning, once each (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.control.snapshot import HeadWord, Snapshot

TOLD_KINDS = ("obstacle", "exit", "stall", "guard", "journal", "checkpoint")
"""Kinds of events that keep a run from its next step or from learning, or that end an obstacle."""


class Bulletin:
    """Turns snapshots into lines. Events are told apart by their order: a clock may be set back.

    >>> bulletin = Bulletin()
    >>> found = Obstacle("buffer.0", Cause.DISK_FULL, "no space left on device")
    >>> bulletin.lines(Snapshot(obstacles=(found,)))
    ['! buffer.0: no space left on device']
    >>> bulletin.lines(Snapshot(obstacles=(found,)))
    []
    """

    def __init__(self) -> None:
        self._is_first = True
        self._newest: Mapping[str, object] | None = None

    def lines(self, snapshot: Snapshot) -> list[str]:
        """Return what is new since the last snapshot; at the first one, what holds."""
        if isinstance(snapshot, HeadWord):
            return []
        events = snapshot.events
        num_told = events.index(self._newest) + 1 if self._newest in events else 0
        self._newest = events[-1] if events else self._newest
        if self._is_first:
            self._is_first = False
            return [line_of(one.service, one.sentence) for one in snapshot.obstacles]
        new = [event for event in events[num_told:] if event.get("kind") in TOLD_KINDS]
        return [line_of(str(event.get("service")), str(event.get("text"))) for event in new]


def line_of(service: str, text: str) -> str:
    """Return what happened to a service as a line that stands out."""
    return f"! {text}" if text.startswith(service) else f"! {service}: {text}"
