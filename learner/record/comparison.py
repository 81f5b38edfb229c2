"""What a replayed step has in common with the recorded one (pure).

Owns the comparison and its words. Two metrics are equal if they are the same number, or both not one; there
is no tolerance: a replay is exact, or something has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Difference:
    """A metric that is not what it was; None where one side has none."""

    name: str
    recorded: float | str | None
    replayed: float | str | None

    def __str__(self) -> str:
        return f"{self.name}: recorded {_word(self.recorded)}, replayed {_word(self.replayed)}"


@dataclass(frozen=True)
class ComparedStep:
    """One replayed step beside its record.

    Attributes:
        step: Learner step, from 0.
        num_metrics: That both have.
        differences: In the order of the recorded metrics, then the weights', then those of the state.
        has_weights: Whether the weights after the step were recorded, and so compared.
        has_state: Whether there is the run's checkpoint after the step, and what it holds was compared.
    """

    step: int
    num_metrics: int
    differences: tuple[Difference, ...]
    has_weights: bool
    has_state: bool = False

    def __str__(self) -> str:
        if self.differences:
            return f"step {self.step}: {len(self.differences)} of {self.num_metrics} differ"
        weights = "weights equal" if self.has_weights else "weights not recorded"
        state = ", checkpoint equal" if self.has_state else ""
        return f"step {self.step}: {self.num_metrics} metrics equal, {weights}{state}"


@dataclass(frozen=True)
class Comparison:
    """A whole replay.

    Attributes:
        began_at: Step of the checkpoint, or 0 for the model of the start.
        first: The first step that was asked for; those before it led there.
    """

    began_at: int
    first: int
    steps: Sequence[ComparedStep] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        return not any(step.differences for step in self.steps)

    def first_difference(self) -> tuple[int, Difference] | None:
        """Return the first step that differs and its first metric; None if all is equal."""
        for step in self.steps:
            if step.differences:
                return step.step, step.differences[0]
        return None


def compare(recorded: Mapping[str, float], replayed: Mapping[str, float]) -> tuple[Difference, ...]:
    """Return the metrics that are not equal, in the order of `recorded`, then those it does not have."""
    names = [*recorded, *(name for name in replayed if name not in recorded)]
    return tuple(
        Difference(name, recorded.get(name), replayed.get(name))
        for name in names
        if not _is_same(recorded.get(name), replayed.get(name))
    )


def _is_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def _word(value: float | str | None) -> str:
    return "nothing" if value is None else f"{value!r}" if isinstance(value, float) else str(value)
