"""Trends of samples: a slope with its interval, and the growth that a week of it would be.

The settled part of a soak is cut into blocks; the slope is that of the medians of the blocks, which neither
garbage collection nor one odd sample moves. A growth of less than the resolution of a quantity is no growth:
a thread pool that was used for the first time is no leak.

A saw-tooth (`benchmarks.soak.teeth`) has two more lines, through its peaks and through its troughs, and
the slope in the middle of the three counts: two of the lines must show a growth. A leak raises all three; a
bounded saw-tooth, wherever the soak begins and ends in it, leaves peaks and troughs level; a few spikes of
different heights move the peaks alone; teeth that become higher move peaks and medians. A series that has
fallen fewer than three times is judged by its medians, as nobody knows yet whether it would fall again.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from benchmarks.soak import sampling
from benchmarks.soak.sampling import Sample
from benchmarks.soak.teeth import MIN_FALLS, Point, find_teeth

NUM_BLOCKS = 10
SETTLING_SHARE = 1 / 3
"""Of a soak, at its beginning: caches fill, allocators and pools take their size."""
WEEK_S = 7 * 86_400.0
WEEK_STEPS = 1_000_000
"""More steps than a week of training with real models has; a soak of small steps ends its week with these."""
GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Limit:
    """A limit of one quantity.

    Attributes:
        week: Growth in a week at most; the unit of the quantity.
        resolution: Growth within a soak that is taken for none.
    """

    week: float
    resolution: float


LIMITS = {
    sampling.MEMORY: Limit(GIB, 8 * MIB),
    sampling.DESCRIPTORS: Limit(500, 20),  # one more group of weight sync that is kept open has 16,
    sampling.THREADS: Limit(500, 8),  # and 6 threads
    "processes": Limit(100, 2),
    "segments": Limit(100, 4),
    "segment_bytes": Limit(GIB, 8 * MIB),
    sampling.FILES: Limit(2000, 16),
    sampling.FILE_BYTES: Limit(2 * GIB, 8 * MIB),
}
"""By quantity: the limit of each process, of the whole run, or of each entry of the run's folder."""


@dataclass(frozen=True)
class Trend:
    """How one label of the samples grows.

    Attributes:
        first, last: Medians of the first and of the last block.
        per_step: Growth in the settled part over its steps.
        week: Growth in a week, or in `WEEK_STEPS` if these come sooner; 0 within the resolution.
        low, high: Interval of 95 % of `week`.
        num_falls: How often the settled part has fallen; from `MIN_FALLS` on it is judged as a saw-tooth.
    """

    label: str
    first: float
    last: float
    per_step: float
    week: float
    low: float
    high: float
    num_falls: int = 0

    @property
    def limit(self) -> float:
        """Return the growth in a week that is allowed."""
        return limit_of(self.label).week

    def ratio(self, *, is_shown: bool) -> float:
        """Return the limit over the growth, at least 1 where it is kept.

        Args:
            is_shown: Count only the growth that the interval shows: its lower end.
        """
        growth = max(self.low if is_shown else self.week, 0.0)
        return self.limit / growth if growth else math.inf


def limit_of(label: str) -> Limit:
    """Return the limit of a label's quantity."""
    return LIMITS[label.partition("/")[0]]


def find_trends(samples: Sequence[Sample]) -> list[Trend]:
    """Return the trend of each label, those that a block lacks excepted.

    Raises:
        ValueError: There are fewer samples than two for each block.
    """
    settled = settled_part(samples)
    if len(settled) < 2 * NUM_BLOCKS:
        raise ValueError(f"{len(settled)} settled samples are too few for {NUM_BLOCKS} blocks")
    bounds = [round(i * len(settled) / NUM_BLOCKS) for i in range(NUM_BLOCKS + 1)]
    blocks = [settled[low:high] for low, high in itertools.pairwise(bounds)]
    labels = sorted(set().union(*(sample.values for sample in settled)))
    found = (_trend_of(label, blocks) for label in labels)
    return [trend for trend in found if trend is not None]


def settled_part(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples after the first third of the time."""
    begin_s = samples[0].at_s + SETTLING_SHARE * (samples[-1].at_s - samples[0].at_s)
    return [sample for sample in samples if sample.at_s >= begin_s]


@dataclass(frozen=True)
class _Line:
    """A slope in units per second, and the half width of its interval."""

    slope: float
    margin: float


FLAT = _Line(0.0, 0.0)


def _trend_of(label: str, blocks: Sequence[Sequence[Sample]]) -> Trend | None:
    of_blocks = [[(one.at_s, one.values[label]) for one in block if label in one.values] for block in blocks]
    if not all(of_blocks):
        return None
    medians = [
        (statistics.fmean(one.at_s for one in block), statistics.median(value for _, value in points))
        for block, points in zip(blocks, of_blocks, strict=True)
    ]
    line, num_falls = _line_of(medians, list(itertools.chain(*of_blocks)), limit_of(label).resolution)
    first, last = blocks[0][0], blocks[-1][-1]
    seconds, steps = last.at_s - first.at_s, last.step - first.step
    horizon_s = min(WEEK_S, WEEK_STEPS * seconds / steps) if steps else WEEK_S
    return Trend(
        label,
        medians[0][1],
        medians[-1][1],
        line.slope * seconds / steps if steps else 0.0,
        line.slope * horizon_s,
        (line.slope - line.margin) * horizon_s,
        (line.slope + line.margin) * horizon_s,
        num_falls,
    )


def _line_of(medians: Sequence[Point], points: Sequence[Point], resolution: float) -> tuple[_Line, int]:
    """Return the line that tells the growth of `points`, and how often they have fallen."""
    growth = medians[-1][1] - medians[0][1]
    of_medians = _fit(medians) if abs(growth) >= resolution else FLAT
    teeth = find_teeth(points, resolution)
    if teeth.num_falls < MIN_FALLS:
        return of_medians, teeth.num_falls
    seconds = points[-1][0] - points[0][0]
    edges = [_fit(ends) for ends in (teeth.peaks, teeth.troughs)]
    grown = [line if abs(line.slope) * seconds >= resolution else FLAT for line in edges]
    return sorted([of_medians, *grown], key=lambda line: line.slope)[1], teeth.num_falls


def _fit(points: Sequence[Point]) -> _Line:
    """Return the least-squares line through points, three at least."""
    found = stats.linregress(*zip(*points, strict=True))
    return _Line(float(found.slope), float(stats.t.ppf(0.975, len(points) - 2) * found.stderr))
