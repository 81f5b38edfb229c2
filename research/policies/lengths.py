"""Log-normal lengths, and the least lag that they allow (pure).

Lengths are cut at `LONGEST` means, as `max_tokens` does, and scaled so that the mean is the one asked for.
"""

from __future__ import annotations

import math
from statistics import NormalDist

LONGEST = 64.0
RESOLUTION = 200
_NORMAL = NormalDist()


def length_of(normal: float, sigma: float, mean: float) -> float:
    """Return the length that belongs to `normal`, drawn from the standard normal distribution."""
    return mean / _cut_mean(sigma) * min(LONGEST, math.exp(sigma * normal - sigma * sigma / 2))


def share_longer(length: float, sigma: float, mean: float) -> float:
    """Return how likely a group is longer than `length`."""
    relative = length / mean * _cut_mean(sigma)
    if relative >= LONGEST:
        return 0.0
    return _NORMAL.cdf(-math.log(relative) / sigma - sigma / 2) if relative > 0 else 1.0


def _cut_mean(sigma: float) -> float:
    """Return E[min(X, LONGEST)] of a log-normal X with mean 1."""
    z = math.log(LONGEST) / sigma
    return _NORMAL.cdf(z - sigma / 2) + LONGEST * _NORMAL.cdf(-z - sigma / 2)


def least_lag(sigma: float, mean: float, max_lag: int) -> float:
    """Return the mean lag if every finished group were trained at the very next step, never waiting longer.

    Steps follow each other without a pause, groups finish at any time of a step alike, over-age tokens
    are masked. A token that is `age` older than the end of its group then has lag `ceil(age + wait)`,
    `wait` uniform between 0 and 1. A rule that trains every group cannot be lower by admission alone.

    Args:
        mean: Mean length, in learner steps.
    """
    weights = [
        _weight_of_lag(lag, sigma, mean) for lag in range(1, max_lag + 1)
    ]  # tokens of lag 1, 2, ..., up to one factor
    return sum(lag * weight for lag, weight in enumerate(weights, 1)) / sum(weights)


def _weight_of_lag(lag: int, sigma: float, mean: float) -> float:
    ages = ((lag - 2) + 2 * (i + 0.5) / RESOLUTION for i in range(RESOLUTION))
    return sum((1 - abs(age - (lag - 1))) * share_longer(age, sigma, mean) for age in ages if age > 0)
