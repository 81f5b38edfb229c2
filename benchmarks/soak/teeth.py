"""Saw-teeth of a series: where it has risen and fallen, as a journal does that removes whole segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_FALLS = 3
"""Of a saw-tooth: fewer peaks and troughs have no line whose error could be told."""
SHARE = 1 / 4
"""Of all that a series spans: a smaller fall is noise on something larger."""

Point = tuple[float, float]
"""A time in seconds and a value."""


@dataclass(frozen=True)
class Teeth:
    """Turning points of a series.

    Attributes:
        peaks: Each highest point before a fall, and the end of a last rise that is higher than all of them.
        troughs: Each lowest point after a fall.
    """

    peaks: Sequence[Point]
    troughs: Sequence[Point]

    @property
    def num_falls(self) -> int:
        """Return how many falls from a peak to a trough there are."""
        return min(len(self.peaks), len(self.troughs))


def find_teeth(points: Sequence[Point], resolution: float) -> Teeth:
    """Return the teeth of a series, in their order.

    A fall, and a rise, is a change of at least the resolution and of a quarter of what the series spans.

    >>> rises = [(0.0, 10.0), (1.0, 50.0), (2.0, 10.0), (3.0, 50.0), (4.0, 12.0), (5.0, 70.0)]
    >>> find_teeth(rises, 1.0)
    Teeth(peaks=[(1.0, 50.0), (3.0, 50.0), (5.0, 70.0)], troughs=[(2.0, 10.0), (4.0, 12.0)])
    """
    values = [value for _, value in points]
    least = max(resolution, SHARE * (max(values) - min(values)))
    peaks: list[Point] = []
    troughs: list[Point] = []
    turn, is_rising = points[0], True
    for point in points:
        if (point[1] >= turn[1]) if is_rising else (point[1] <= turn[1]):
            turn = point
        elif abs(point[1] - turn[1]) >= least:
            if turn is not points[0]:  # it was higher, or lower, before: nobody knows by how much
                (peaks if is_rising else troughs).append(turn)
            turn, is_rising = point, not is_rising
    if not is_rising:
        troughs.append(turn)
    elif peaks and turn[1] > max(value for _, value in peaks):
        peaks.append(turn)
    return Teeth(peaks, troughs)
