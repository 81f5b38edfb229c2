"""How often a unit may be started again, and how soon (pure).

Invariant: in any `WINDOW_S` seconds at most `max_restarts` are granted, and never more than that in a row
to a unit that does not come up in between, however slowly it fails.
"""

from __future__ import annotations

from collections.abc import Iterable

WINDOW_S = 600.0
DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before the first restart, the second, ..."""


class Budget:
    """The restarts of one unit.

    Args:
        max_restarts: At most so many within `WINDOW_S`.
        times: Of earlier restarts, oldest first.
        was_up: The unit came up after the last of them.
    """

    def __init__(self, max_restarts: int, times: Iterable[float] = (), *, was_up: bool = True) -> None:
        self._max_restarts = max_restarts
        self._times = list(times)
        self._was_up = was_up

    @property
    def times(self) -> tuple[float, ...]:
        """When restarts were granted that still count, oldest first."""
        return tuple(self._times)

    @property
    def was_up(self) -> bool:
        """Whether the unit has been up since the last restart."""
        return self._was_up

    def note_up(self) -> None:
        """The unit has come up: from here on its older restarts may be forgotten."""
        self._was_up = True

    def ask(self, now: float) -> float | None:
        """Grant a restart and return in how many seconds, or return None: it was one too many."""
        if self._was_up:
            self._times = [then for then in self._times if now - then < WINDOW_S]
        if len(self._times) >= self._max_restarts:
            return None
        delay_s = DELAYS_S[min(len(self._times), len(DELAYS_S) - 1)]
        self._times.append(now + delay_s)  # the restart is then; so no two windows share it
        self._was_up = False
        return delay_s
