"""The outcome of a seed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """One seed that was played.

    Attributes:
        broken: A sentence for each promise that was broken.
        trace: Digest of all that happened: equal for equal seeds.
        lines: Of the trace, if they were kept.
    """

    seed: int
    faults: str
    broken: tuple[str, ...]
    trace: str
    virtual_s: float
    num_events: int
    num_starts: int
    lines: tuple[str, ...] = field(default=(), repr=False)
