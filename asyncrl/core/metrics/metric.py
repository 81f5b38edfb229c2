"""Declaration of one metric, and builders of families of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Row = dict[str, float]
"""Metrics by their names, of one step or of one evaluation."""

Reduction = Literal["mean", "max", "min", "sum", "leader"]
"""Rule for one step's value from its microbatches, updates and data-parallel ranks. `leader`: rank 0
or the supervisor alone knows the value."""

Over = Literal[
    "counted tokens",
    "tokens in bound",
    "current tokens",
    "trained tokens",
    "checked tokens",
    "rows",
    "answered rows",
    "ranks",
    "updates",
    "-",
]
"""Tokens or rows that a mean is taken over. Counted tokens are sampled ones before masking by age or
rejection; those in bound are left after masking by age; current ones belong to rows that the weights being
trained have sampled whole; trained ones entered the loss; checked ones were measured again after it. A row
is a trajectory; it is answered if its response has at least one token (verl: not aborted)."""


@dataclass(frozen=True)
class Metric:
    """One name. `<word>` in it stands for a variable part, see `registry.PLACEHOLDERS`.

    Attributes:
        name: verl's name where verl has the metric.
        unit: `1` for a pure number.
        meaning: Its meaning, and the condition under which it is present.
        reduction: See `Reduction`.
        over: See `Over`; "-" unless the reduction is a mean.
        source: Its producer: `step` (every learner rank), `leader`, `supervisor`, `evaluation`, `guard`.
    """

    name: str
    unit: str
    meaning: str
    reduction: Reduction = "mean"
    over: Over = "-"
    source: str = "step"


def spread(name: str, unit: str, meaning: str, over: Over) -> list[Metric]:
    """Return `name`/mean, /max and /min."""
    return [
        Metric(f"{name}/mean", unit, f"Mean {meaning}", "mean", over),
        Metric(f"{name}/max", unit, f"Largest {meaning}", "max"),
        Metric(f"{name}/min", unit, f"Smallest {meaning}", "min"),
    ]


def means(over: Over, *rows: tuple[str, str, str]) -> list[Metric]:
    """Return metrics of every rank, averaged `over`: (name, unit, meaning) each."""
    return [Metric(name, unit, meaning, "mean", over) for name, unit, meaning in rows]


def singles(source: str, *rows: tuple[str, str, str]) -> list[Metric]:
    """Return metrics that one process makes for the whole run."""
    return [Metric(name, unit, meaning, "leader", "-", source) for name, unit, meaning in rows]
