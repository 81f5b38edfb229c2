"""Sums that make a mean and its interval, whoever adds them up (pure).

Parts of an evaluation report tallies; tallies of one name add up to that of the whole. Intervals cover 95 %:
for shares Wilson's score interval (Wilson 1927; Brown, Cai and DasGupta 2001), with as many trials as the
spread between prompts makes of them: answers to one prompt are no independent trials (design effect, Kish
1965; clustered errors of evaluations, arXiv 2411.00640). For other means the normal one, over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Z = 1.959963984540054
"""Two-sided 95 % of the normal distribution."""
LOW, HIGH = "low", "high"
TINY = 1e-12
"""Variances below it are rounding: equal shares come out as 0 or as some 1e-17, by the order of adding."""


class Tally(NamedTuple):
    """Sums over prompts of one value per prompt.

    Attributes:
        num_values: Prompts; 0 says that `total` is the result itself, such as a number of failures.
        total, squares: Sum of the values, and of their squares.
        trials: Answers behind the values, where each is a share; 0 where they are not.
    """

    num_values: int
    total: float
    squares: float = 0.0
    trials: int = 0

    @property
    def value(self) -> float:
        """The mean over prompts, or the sum."""
        return self.total / self.num_values if self.num_values else self.total

    def plus(self, other: Tally) -> Tally:
        """Return the tally of both together."""
        return Tally(
            self.num_values + other.num_values,
            self.total + other.total,
            self.squares + other.squares,
            self.trials + other.trials,
        )

    def interval(self) -> tuple[float, float] | None:
        """Return the bounds of the mean, None where a single prompt or a mere sum has none."""
        if self.num_values < 2:
            return None
        variance = max(0.0, self.squares / self.num_values - self.value * self.value)
        if not self.trials:
            half = Z * math.sqrt(variance / (self.num_values - 1))
            return self.value - half, self.value + half
        share = min(1.0, max(0.0, self.value))
        return wilson(share, self._num_effective(share, variance))

    def _num_effective(self, share: float, variance: float) -> float:
        """Return how many independent trials would spread as these do; between one and `trials`."""
        spread = share * (1.0 - share)  # of independent trials
        if spread <= TINY:  # all right or all wrong: nothing tells prompts from trials, so each counts once
            return float(self.num_values)
        return min(float(self.trials), max(1.0, spread * self.num_values / max(variance, TINY)))


def wilson(share: float, num_trials: float) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a share of `num_trials` trials.

    >>> [round(bound, 4) for bound in wilson(0.8, 10)]
    [0.4902, 0.9433]
    """
    middle = share + Z * Z / (2 * num_trials)
    half = Z * math.sqrt(share * (1 - share) / num_trials + (Z / (2 * num_trials)) ** 2)
    scale = 1 + Z * Z / num_trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def add_up(parts: Iterable[Mapping[str, Tally]]) -> dict[str, Tally]:
    """Return the tallies of all parts together, by name."""
    sums: dict[str, Tally] = {}
    for part in parts:
        for name, tally in part.items():
            before = sums.get(name)
            sums[name] = tally if before is None else before.plus(tally)
    return sums


def conclude(tallies: Mapping[str, Tally]) -> dict[str, float]:
    """Return the value of each name, and `<name>/low` and `<name>/high` where it has an interval."""
    found: dict[str, float] = {}
    for name, tally in sorted(tallies.items()):
        found[name] = tally.value
        if (bounds := tally.interval()) is not None:
            found[f"{name}/{LOW}"], found[f"{name}/{HIGH}"] = bounds
    return found


def tally_shares(shares: Sequence[float], num_answers: int) -> Tally:
    """Return the tally of one share per prompt, each out of `num_answers` answers."""
    squares = sum(share * share for share in shares)
    return Tally(len(shares), sum(shares), squares, len(shares) * num_answers)


def tally_values(values: Sequence[float]) -> Tally:
    """Return the tally of one value per prompt, of any size."""
    return Tally(len(values), sum(values), sum(value * value for value in values))
