"""Comparison of a replayed step with the recorded one (pure).

Owns the comparison and its words. Two metrics are equal if they are the same number, or both not one; there
is no tolerance: a replay is exact, or something has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WEIGHTS = "weights"
"""The name under which a digest of weights that differs is told."""


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
        num_metrics: That the run or the replay has.
        num_different: Number of metrics that differ: the first ones of `differences`.
        differences: In the order of the recorded metrics, then the weights', then those of the state.
        has_weights: Whether the weights after the step were recorded, and so compared.
        has_state: Whether there is the run's checkpoint after the step, and what it holds was compared.
    """

    step: int
    num_metrics: int
    num_different: int
    differences: tuple[Difference, ...]
    has_weights: bool
    has_state: bool = False

    def __str__(self) -> str:
        others = [difference.name for difference in self.differences[self.num_different :]]
        has_other_state = any(name != WEIGHTS for name in others)
        return f"step {self.step}: " + ", ".join(
            [
                _describe_metrics(self.num_metrics, self.num_different),
                f"weights {_verdict(WEIGHTS in others)}" if self.has_weights else "weights not recorded",
                *([f"checkpoint {_verdict(has_other_state)}"] if self.has_state else []),
            ]
        )


def _describe_metrics(num_metrics: int, num_different: int) -> str:
    if not num_different:
        return f"{num_metrics} metrics equal"
    return f"{num_different} of {num_metrics} metrics {'differs' if num_different == 1 else 'differ'}"


def _verdict(is_different: bool) -> str:
    return "different" if is_different else "equal"


@dataclass(frozen=True)
class Comparison:
    """A whole replay.

    Attributes:
        began_at: Step of the checkpoint, or 0 for the model of the start.
        first: The first step that was asked for; those before it led there, and are compared as well.
    """

    began_at: int
    first: int
    steps: Sequence[ComparedStep] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        return not any(step.differences for step in self.steps)

    def first_to_differ(self, *, on_the_way: bool = False) -> ComparedStep | None:
        """Return the first step that differs, of those asked for or of those before; None if none does."""
        for step in self.steps:
            if step.differences and (step.step < self.first) == on_the_way:
                return step
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
