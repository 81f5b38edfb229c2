"""Watch over a run's obstacles: which are new, which have grown, which are over (pure).

Owns since when each holds. An obstacle that comes and goes, as rewards of which a few fail, is one: it is
over only when it has been away for `AWAY_S`. Invariant: each is told at once when it first happens, again
for another reason or when its count is `GROWTH` times what was told last, and when it is over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.core.obstacle import Obstacle

AWAY_S = 10.0
GROWTH = 4
MAX_REASONS = 8
"""Reports of one obstacle; reasons that differ in numbers only are one."""


@dataclass(frozen=True)
class News:
    """Report on an obstacle; `is_over` with the seconds that it held."""

    obstacle: Obstacle
    is_over: bool = False
    held_s: float = 0.0

    @property
    def text(self) -> str:
        """The report as a sentence."""
        if self.is_over:
            return f"over after {self.held_s:.0f} s: {self.obstacle.reason}"
        return self.obstacle.sentence


@dataclass
class _Known:
    obstacle: Obstacle
    told_count: int
    seen_at: float
    told: set[str] = field(default_factory=set)


class ObstacleWatch:
    """See the module.

    Attributes:
        present: The obstacles of the last look, with the time of their first happening.
    """

    def __init__(self) -> None:
        self.present: list[Obstacle] = []
        self._known: dict[tuple[str, str], _Known] = {}

    def look(self, now: float, found: Sequence[Obstacle]) -> list[News]:
        """Take in the obstacles of time `now` (wall-clock seconds) and return the reports that are due."""
        news = [told for one in found if (told := self._meet(now, one)) is not None]
        self.present = [self._known[one.key].obstacle for one in found]
        return news + self._part(now)

    def _meet(self, now: float, one: Obstacle) -> News | None:
        known = self._known.get(one.key)
        if known is None:
            dated = one.seen(since=now, blocks=one.blocks)
            self._known[one.key] = _Known(dated, one.count, now, {_without_numbers(one.reason)})
            return News(dated)
        known.obstacle, known.seen_at = one.seen(since=known.obstacle.since, blocks=one.blocks), now
        reason = _without_numbers(one.reason)
        is_other = reason not in known.told and len(known.told) < MAX_REASONS
        if not is_other and one.count < GROWTH * known.told_count:
            return None
        known.told.add(reason)
        known.told_count = one.count
        return News(known.obstacle)

    def _part(self, now: float) -> list[News]:
        over = [known for known in self._known.values() if now - known.seen_at >= AWAY_S]
        for known in over:
            del self._known[known.obstacle.key]
        return [News(one.obstacle, True, one.seen_at - one.obstacle.since) for one in over]


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+", "#", reason)
