"""Trends of samples: a slope with its interval, and the growth that a week of it would be.

The settled part of a soak is cut into blocks; the slope is that of the medians of the blocks, which neither
garbage collection nor one odd sample moves. A growth of less than the resolution of a quantity is no growth:
a thread pool that was used for the first time is no leak.

A saw-tooth (`benchmarks.soak.teeth`) has two more lines, through its peaks and through its troughs, and
the slope in the middle of the three counts: two of the lines must show a growth. A leak raises all three; a
bounded saw-tooth, wherever the soak begins and ends in it, leaves peaks and troughs level; a few spikes of
different heights move the peaks alone; teeth that become higher move peaks and medians. A series that has
fallen fewer than three times is judged by its medians, as nobody knows yet whether it would fall again.

Two series have a rule of their own, which is production's: the payloads of the file journal, whose teeth are
longer than a soak, are judged by the most that they may be (`CAPS`); TensorBoard's files, which get fewer
steps the longer a run is, grow by the steps that are written (`written_steps`).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from asyncrl.buffer.journals.segments import RECENT_SEGMENTS, SEGMENT_BYTES
from asyncrl.control.record.sinks.tensorboard import is_drawn
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
CAPS = {"file_bytes/buffer/payloads": float((RECENT_SEGMENTS + 1) * SEGMENT_BYTES)}
"""The most that a series may be at any time: the newest segments, and one that waits for its deletion."""
THINNED = "file_bytes/tensorboard"
EVALUATED_EVERY = 25
"""Steps, in the quickstart. TensorBoard gets every evaluation."""


@dataclass(frozen=True)
class Trend:
    """Growth of one label of the samples.

    Attributes:
        first, last: Medians of the first and of the last block.
        per_step: Growth in the settled part over its steps.
        week: Growth in a week, or in `WEEK_STEPS` if these come sooner; 0 within the resolution.
        low, high: Interval of 95 % of `week`.
        num_falls: Number of falls in the settled part; from `MIN_FALLS` on it is judged as a saw-tooth.
        highest: The highest value of the settled part.
    """

    label: str
    first: float
    last: float
    per_step: float
    week: float
    low: float
    high: float
    num_falls: int = 0
    highest: float = 0.0

    @property
    def limit(self) -> float:
        """Return the growth in a week that is allowed."""
        return limit_of(self.label).week

    def ratio(self, *, is_shown: bool) -> float:
        """Return the limit over the growth, or the cap over the highest value; at least 1 where it is kept.

        Args:
            is_shown: Count only the growth that the interval shows: its lower end.
        """
        if self.label in CAPS:
            return CAPS[self.label] / self.highest if self.highest else math.inf
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
    """A slope in units per second, or per step that is written, and the half width of its interval."""

    slope: float
    margin: float


FLAT = _Line(0.0, 0.0)


def _trend_of(label: str, blocks: Sequence[Sequence[Sample]]) -> Trend | None:
    kept = [[one for one in block if label in one.values] for block in blocks]
    if not all(kept):
        return None
    first, last = blocks[0][0], blocks[-1][-1]
    seconds, steps = last.at_s - first.at_s, last.step - first.step
    horizon = horizon_s = min(WEEK_S, WEEK_STEPS * seconds / steps) if steps else WEEK_S
    at = [[one.at_s for one in block] for block in kept]
    if label == THINNED:
        week_steps = round(horizon_s * steps / seconds)
        written = written_steps(last.step + week_steps)
        at = [[float(bisect.bisect_right(written, one.step)) for one in block] for block in kept]
        horizon = len(written) - at[-1][-1]
    values = [[one.values[label] for one in block] for block in kept]
    medians = [(statistics.fmean(x), statistics.median(y)) for x, y in zip(at, values, strict=True)]
    points = list(zip(itertools.chain(*at), itertools.chain(*values), strict=True))
    line, num_falls = _line_of(medians, points, limit_of(label).resolution)
    return Trend(
        label,
        first=medians[0][1],
        last=medians[-1][1],
        per_step=line.slope * (at[-1][-1] - at[0][0]) / steps if steps else 0.0,
        week=line.slope * horizon,
        low=(line.slope - line.margin) * horizon,
        high=(line.slope + line.margin) * horizon,
        num_falls=num_falls,
        highest=max(value for _, value in points),
    )


@functools.cache
def written_steps(until: int) -> Sequence[int]:
    """Return the steps up to `until` that TensorBoard gets a row of."""
    return [step for step in range(1, until + 1) if is_drawn(step) or step % EVALUATED_EVERY == 0]


def _line_of(medians: Sequence[Point], points: Sequence[Point], resolution: float) -> tuple[_Line, int]:
    """Return the line that tells the growth of `points`, and how often they have fallen."""
    growth = medians[-1][1] - medians[0][1]
    of_medians = _fit(medians) if abs(growth) >= resolution else FLAT
    teeth = find_teeth(points, resolution)
    if teeth.num_falls < MIN_FALLS:
        return of_medians, teeth.num_falls
    span = points[-1][0] - points[0][0]
    edges = [_fit(ends) for ends in (teeth.peaks, teeth.troughs)]
    grown = [line if abs(line.slope) * span >= resolution else FLAT for line in edges]
    return sorted([of_medians, *grown], key=lambda line: line.slope)[1], teeth.num_falls


def _fit(points: Sequence[Point]) -> _Line:
    """Return the least-squares line through points, three at least."""
    found = stats.linregress(*zip(*points, strict=True))
    return _Line(float(found.slope), float(stats.t.ppf(0.975, len(points) - 2) * found.stderr))
