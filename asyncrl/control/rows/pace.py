"""Remaining time of a run, from the times of its steps (pure).

The newest half of the steps, or the newest hundred if these are more, set the pace: one slow step, an
evaluation or a checkpoint among them moves the estimate by its share of that time only. Time in which the run
is paused does not count.
"""

from __future__ import annotations

from collections import deque

LEAST_STEPS = 100
MIN_STEPS, MAX_STEPS = 3, 2000
"""Steps from which on there is an estimate, and that are remembered; the first of a life is no pace."""


class Pace:
    """Estimates the time that is left.

    >>> pace = Pace()
    >>> for second in range(10):
    ...     pace.note(2.0 * second, second, is_working=True)
    >>> pace.time_left_s(19)
    20.0
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=MAX_STEPS)
        self._worked_s = 0.0
        self._noted: float | None = None

    def note(self, now: float, step: int, *, is_working: bool) -> None:
        """Take note that `step` steps are done at time `now` (seconds)."""
        if self._noted is not None and is_working:
            self._worked_s += max(0.0, now - self._noted)
        self._noted = now
        if self._steps and step < self._steps[-1][1]:  # a rollback, or a learner that was started again
            self._steps.clear()
        if not self._steps or step > self._steps[-1][1]:
            self._steps.append((self._worked_s, step))

    def time_left_s(self, steps: int) -> float | None:
        """Return the seconds until `steps` steps are done, None while too little is known."""
        timed = list(self._steps)[1:]  # the first entry is where this life began
        if len(timed) <= MIN_STEPS:
            return None
        newest = timed[-max(LEAST_STEPS, len(timed) // 2) :]
        (then, first), (last_s, last) = newest[0], newest[-1]
        per_step_s = (last_s - then) / (last - first)
        since_s = min(self._worked_s - last_s, per_step_s)
        return max(0.0, (steps - last) * per_step_s - since_s)
