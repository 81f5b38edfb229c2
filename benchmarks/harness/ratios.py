"""Ratio of one measured value on both sides of a comparison, with its noise (`asyncrl bench compare`)."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.rows import Row


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
