"""Ratio of one measured value on both sides of a comparison, with its noise (`asyncrl bench compare`)."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass

from scipy.stats import t

from benchmarks.harness.rows import Row, spread_of

LEVEL = 0.95
"""Of medians of the same distribution, the share that lie within their noise of it."""
MIN_SAMPLES = 4
"""Fewer say too little of how much they swing."""
_MEDIAN_OVER_MEAN = 1.25
"""Standard error of a median over that of a mean, of many normal samples: sqrt(pi / 2)."""
_MANY = 1000
"""Samples beyond which their number does not change what spread is expected."""


@dataclass(frozen=True)
class Ratio:
    """One value of both sides.

    Attributes:
        noise: Distance from 0 that the difference of two equal medians may have, in the value's unit; None
            if unknown.
        unknown: Reason for that.
    """

    row: Row
    value: str
    one: float
    other: float
    noise: float | None
    unknown: str = ""

    @property
    def ratio(self) -> float | None:
        """B over A; 1 where both are 0, None where only A is."""
        if self.one == self.other:
            return 1.0
        return self.other / self.one if self.one else None

    @property
    def noise_share(self) -> float | None:
        """The noise of the ratio: `noise` over A, None if one of them is not there."""
        return None if self.noise is None or not self.one else self.noise / abs(self.one)

    @property
    def verdict(self) -> str:
        if self.one == self.other:
            return "equal"
        if self.noise is None:
            return self.unknown
        return "noise is larger" if abs(self.other - self.one) <= self.noise else "differs"


def noise_of_median(spread: float, num_samples: int) -> float:
    """Return how far a median of at least `MIN_SAMPLES` samples may be from the true one, in their unit.

    At `LEVEL`: Student's quantile x 1.25 x standard deviation / sqrt(num_samples), for samples that are
    independent and not far from normal. The deviation is the spread over what so many standard normal samples
    have of it, so that a stray sample among ten or more counts little.

    >>> round(noise_of_median(1.2816, 100), 2)
    0.25
    """
    assert num_samples >= MIN_SAMPLES, "too few samples to know their noise"
    deviation = spread / _expected_spread(min(num_samples, _MANY))
    quantile = float(t.ppf((1 + LEVEL) / 2, num_samples - 1))
    return quantile * _MEDIAN_OVER_MEAN * deviation / math.sqrt(num_samples)


@functools.cache
def _expected_spread(num_samples: int) -> float:
    """Return the spread of standard normal samples: of their expected values in order (Blom 1958)."""
    normal = statistics.NormalDist()
    return spread_of(
        [normal.inv_cdf((place - 0.375) / (num_samples + 0.25)) for place in range(1, num_samples + 1)]
    )
