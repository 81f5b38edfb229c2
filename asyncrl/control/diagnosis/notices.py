"""Notices: what services tell of that happened to them once, each an event of the run.

What holds for a while is an obstacle instead (`asyncrl.control.diagnosis.lookout`).
"""

from __future__ import annotations

from asyncrl.control.record.events import KEPT, EventLog, Kind
from asyncrl.core.service_status import BUFFER, LEARNER, Statuses


class Notices:
    """Makes an event of each notice, once in a life of the run, also where the supervisor is replaced."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._told: set[str] | None = None

    def look(self, statuses: Statuses) -> None:
        """Tell what the statuses hold of findings of the guard, of checkpoints and of lost journals."""
        if (learner := statuses.learner) is not None:
            for one in learner.findings:
                text = f"the guard found, {one.text}"
                self._tell("guard", LEARNER, text, finding=one.kind, step=one.step)
            for sentence in learner.torn:
                self._tell("checkpoint", LEARNER, sentence)
        if (buffer := statuses.buffer) is not None:
            for sentence in buffer.journal.told_losses:
                self._tell("journal", BUFFER, sentence)

    def _tell(self, kind: Kind, service: str, text: str, **fields: object) -> None:
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
