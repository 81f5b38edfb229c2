"""How long each service has been in a state that must not last (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SILENT, DRAINING = "silent", "DRAINING"
SILENCE_LIMIT_S = 60.0


@dataclass(frozen=True)
class Overdue:
    """A service that has been in `state` for longer than `limit_s` seconds."""

    name: str
    state: str
    limit_s: float


class Vitals:
    """Remembers since when services have been silent, starting, syncing or draining.

    Silence has a limit of its own and hides the state under it: who speaks again goes on counting.
    """

    def __init__(self, start_deadline_s: float) -> None:
        passing = ("starting", "STARTING", "SYNCING", DRAINING)
        self._limits = {SILENT: SILENCE_LIMIT_S} | dict.fromkeys(passing, start_deadline_s)
        self._silent_since: dict[str, float] = {}
        self._since: dict[str, tuple[str, float]] = {}

    def overdue(self, now: float, statuses: Mapping[str, Mapping[str, Any]]) -> list[Overdue]:
        """Take in the statuses of time `now` (seconds); return who has been in a passing state too long."""
        for known in (self._silent_since, self._since):
            for name in set(known) - set(statuses):
                del known[name]  # type: ignore[attr-defined]
        return [found for name, status in statuses.items() if (found := self._judge(now, name, status))]

    def _judge(self, now: float, name: str, status: Mapping[str, Any]) -> Overdue | None:
        state = str(status.get("state"))
        if state == SILENT:
            since = self._silent_since.setdefault(name, now)
        else:
            self._silent_since.pop(name, None)
            if state not in self._limits:
                self._since.pop(name, None)
                return None
            if self._since.get(name, ("", now))[0] != state:
                self._since[name] = (state, now)
            since = self._since[name][1]
        limit_s = self._limits[state]
        return Overdue(name, state, limit_s) if now - since > limit_s else None
