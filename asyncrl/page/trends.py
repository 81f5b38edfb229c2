"""Trends over time: rates from counters, and curves of bounded size from rows (pure).

Invariant: however long a run is, its curves have at most `MAX_POINTS` points; a step that is recorded
again after a resume replaces the points from that step on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.core.metrics.metric import Row

WINDOW_S = 10.0
MAX_POINTS = 400
STEP = "training/global_step"

SERIES = {
    "reward": "critic/rewards/mean",
    "kl": "actor/ppo_kl",
    "rollout_kl": "rollout_corr/kl",
    "entropy": "actor/entropy",
    "lag_mean": "staleness/lag_mean",
    "lag_max": "staleness/lag_max_trained",
    "rollout_tokens": "perf/rollout_tokens_per_s",
    "learner_tokens": "perf/learner_tokens_per_s",
    "rollout_idle": "perf/rollout_idle_share",
    "learner_idle": "perf/learner_idle_share",
}
"""The curves, and the metric that each shows."""
LARGEST = ("lag_max",)
"""Curves of which a point shows the largest value of its rows, not the mean."""


class FlowMeter:
    """Turns counters that only rise into rates over the last `WINDOW_S` seconds.

    >>> meter = FlowMeter()
    >>> meter.update(0.0, {"trained": 0}), meter.update(2.0, {"trained": 8})
    ({}, {'trained': 4.0})
    """

    def __init__(self) -> None:
        self._past: deque[tuple[float, dict[str, float]]] = deque()

    def update(self, now: float, counters: Mapping[str, float]) -> dict[str, float]:
        """Take in the counters of time `now` (seconds); return what each gained per second.

        A counter that fell belongs to a service that was replaced: its rate begins anew.
        """
        past = self._past
        if past and any(value < past[-1][1].get(name, value) for name, value in counters.items()):
            past.clear()
        past.append((now, dict(counters)))
        while len(past) > 2 and now - past[1][0] >= WINDOW_S:
            past.popleft()
        then, before = past[0]
        if now <= then:
            return {}
        return {
            name: (value - before[name]) / (now - then) for name, value in counters.items() if name in before
        }


@dataclass
class _Point:
    """Some neighbouring rows: their last step and number, and for each curve its (sum, count, largest)."""

    last_step: int
    num_rows: int
    sums: dict[str, tuple[float, int, float]]

    def join(self, later: _Point) -> None:
        """Stand for the rows of `later` too."""
        self.last_step = later.last_step
        self.num_rows += later.num_rows
        for name, (total, count, largest) in later.sums.items():
            ours = self.sums.get(name, (0.0, 0, -math.inf))
            self.sums[name] = (ours[0] + total, ours[1] + count, max(ours[2], largest))

    def value(self, name: str) -> float | None:
        if name not in self.sums:
            return None
        total, count, largest = self.sums[name]
        return largest if name in LARGEST else total / count


class Curves:
    """Keeps the curves of a run, thinner the longer it gets.

    >>> curves = Curves(max_points=2)
    >>> for step in range(1, 5):
    ...     curves.add({STEP: step, "critic/rewards/mean": step})
    >>> curves.as_values()["steps"], curves.as_values()["reward"]
    ([2, 4], [1.5, 3.5])
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._points: list[_Point] = []
        self._stride = 1
        self._accuracy: dict[int, float] = {}

    def add(self, row: Row) -> None:
        """Take in the row of a step."""
        step = int(row[STEP])
        while self._points and self._points[-1].last_step >= step:
            self._points.pop()
        values = {name: float(row[key]) for name, key in SERIES.items() if _is_number(row.get(key))}
        point = _Point(step, 1, {name: (value, 1, value) for name, value in values.items()})
        if self._points and self._points[-1].num_rows < self._stride:
            self._points[-1].join(point)
        else:
            self._points.append(point)
        if len(self._points) > self._max_points:
            self._thin()

    def add_accuracy(self, step: int, accuracy: float) -> None:
        """Take in an evaluation; the newest `MAX_POINTS` are kept."""
        kept = [(known, value) for known, value in self._accuracy.items() if known < step]
        self._accuracy = dict([*kept, (step, accuracy)][-self._max_points :])

    def as_values(self) -> dict[str, object]:
        """Return `steps`, one list per curve (None where rows lack it), and the evaluations as pairs."""
        return {
            "steps": [point.last_step for point in self._points],
            **{name: [point.value(name) for point in self._points] for name in SERIES},
            "accuracy": [list(pair) for pair in self._accuracy.items()],
        }

    def _thin(self) -> None:
        """Halve the number of points; each then stands for twice as many rows."""
        self._stride *= 2
        kept = self._points[::2]
        for point, later in zip(kept, self._points[1::2], strict=False):
            point.join(later)
        self._points = kept


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
