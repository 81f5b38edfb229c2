"""Restart budget of a unit: number and delay of its restarts (pure).

A restart counts until the unit has worked since: it came up, and the progress that it is judged by rose
while it was up. The restart of a unit that came up and had no work, as in a paused run, is forgotten after
`WINDOW_S`. Invariant: a unit that does no work in between is granted `max_restarts` in a row, however slowly
it fails; a unit that works between its deaths is granted each restart.
"""

from __future__ import annotations

from collections.abc import Iterable

WINDOW_S = 600.0
DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before the first restart, the second, ..."""
BACK_OFFS_S = (120.0, 240.0, 480.0, 600.0)
"""For which a unit is retired once its restarts are spent, the first time in a row, the second, ..."""


class Budget:
    """The restarts of one unit.

    Args:
        max_restarts: At most so many count at a time.
        times: Of earlier restarts that count, oldest first.
        was_up: The unit came up after the last of them.
        num_spent: See the attribute.

    Attributes:
        num_spent: Times in a row that `renew` was called with all restarts spent, without work in between.
    """

    def __init__(
        self, max_restarts: int, times: Iterable[float] = (), *, was_up: bool = True, num_spent: int = 0
    ) -> None:
        self._max_restarts = max_restarts
        self._times = list(times)
        self._was_up = was_up
        self._progress_when_up: int | None = None
        self.num_spent = num_spent

    @property
    def times(self) -> tuple[float, ...]:
        """Times of the granted restarts that still count, oldest first."""
        return tuple(self._times)

    @property
    def was_up(self) -> bool:
        """Whether the unit has been up since the last restart."""
        return self._was_up

    def note_up(self, progress: int) -> None:
        """Take note that the unit is up and that its progress is `progress`; a rise shows that it works."""
        self._was_up = True
        if self._progress_when_up is None:
            self._progress_when_up = progress
        elif progress > self._progress_when_up:
            self._times, self.num_spent = [], 0

    def ask(self, now: float) -> float | None:
        """Grant a restart and return in how many seconds, or return None: it was one too many."""
        if self._was_up:
            self._times = [then for then in self._times if now - then < WINDOW_S]
        if len(self._times) >= self._max_restarts:
            return None
        delay_s = DELAYS_S[min(len(self._times), len(DELAYS_S) - 1)]
        self._times.append(now + delay_s)  # the restart is then; so no two windows share it
        self._was_up, self._progress_when_up = False, None
        return delay_s

    def renew(self) -> float:
        """Allow all restarts again, and return after how many seconds the first of them may be."""
        back_off_s = BACK_OFFS_S[min(self.num_spent, len(BACK_OFFS_S) - 1)]
        self.num_spent += 1
        self._times, self._was_up, self._progress_when_up = [], False, None
        return back_off_s
