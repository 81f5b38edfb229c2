"""Notices: what services tell of that happened to them once, each an event of the run.

What holds for a while is an obstacle instead (`asyncrl.control.lookout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.control.record.events import KEPT, EventLog, Kind


class Notices:
    """Makes an event of each notice, once in a life of the run, also where the supervisor is replaced."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._told: set[str] | None = None

    def look(self, statuses: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell what the statuses hold of findings of the guard, of checkpoints and of lost journals."""
        learner, journal = statuses.get("learner.0", {}), statuses.get("buffer.0", {}).get("journal") or {}
        for one in learner.get("findings", ()):
            text = f"the guard found, {one['text']}"
            self._tell("guard", "learner.0", text, finding=one["kind"], step=one["step"])
        for sentence in learner.get("torn", ()):
            self._tell("checkpoint", "learner.0", sentence)
        for sentence in journal.get("losses", ()):
            self._tell("journal", "buffer.0", sentence)

    def _tell(self, kind: Kind, service: str, text: str, **fields: Any) -> None:
        told = self._told = self._told_in_this_life() if self._told is None else self._told
        if text not in told:
            told.add(text)
            self._events.add(kind, service, text, **fields)

    def _told_in_this_life(self) -> set[str]:
        told: set[str] = set()
        for event in self._events.newest(KEPT):
            is_start = (event["kind"], event.get("service")) == ("start", "run")
            told = set() if is_start else told | {str(event.get("text"))}
        return told
