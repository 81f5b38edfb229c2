"""Tally of a simulated run (pure).

The steps of a window, after the warm-up, give idle time, lag and violations. The groups admitted in
that window, the cohort, give the share and the length bias: each group is followed to its end, so that no
long group is missed because the count ended before it did.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from research.policies.work import Work


@dataclass(frozen=True)
class Figures:
    """Figures of a rule.

    Attributes:
        violations: Trained tokens over the bound, as a share of the trained ones.
        idle: Share of its time that the learner waits.
        share: Share of the generated tokens that train within the bound.
        length_bias: Mean full length of the trained groups over that of all groups begun.
        mean_lag: Of trained tokens.
        pace: Tokens trained within the bound per unit of time, over what a learner that never waits
            and masks nothing would train.
    """

    violations: float
    idle: float
    share: float
    length_bias: float
    mean_lag: float
    pace: float

    def as_values(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Tally:
    """Counters of one run.

    Attributes:
        first_step, last_step: The window: steps `first_step <= step < last_step`.
        tokens_by_lag: Trained tokens of the window's steps, by lag.
    """

    first_step: int
    last_step: int
    tokens_by_lag: Counter[int] = field(default_factory=Counter)
    waited: float = 0.0
    num_counted: int = 0
    num_settled: int = 0
    num_trained: int = 0
    counted_tokens: int = 0
    generated_tokens: int = 0
    full_tokens_of_trained: int = 0
    in_bound_tokens: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_settled == self.num_counted > 0

    def covers(self, step: int) -> bool:
        """Tell whether the step belongs to the window."""
        return self.first_step <= step < self.last_step

    def begin(self, work: Work, step: int) -> None:
        """Count a group that starts while the learner is at `step`."""
        work.is_counted = self.covers(step)
        if work.is_counted:
            self.num_counted += 1
            self.counted_tokens += work.num_tokens

    def train(self, work: Work, step: int, tokens_by_lag: Counter[int], max_lag: int) -> None:
        """Count a group that step `step` trains; `tokens_by_lag` holds its unmasked tokens."""
        if self.covers(step):
            self.tokens_by_lag.update(tokens_by_lag)
        if work.is_counted:
            self.num_settled += 1
            self.num_trained += 1
            self.generated_tokens += work.num_tokens
            self.full_tokens_of_trained += work.num_tokens
            self.in_bound_tokens += sum(n for lag, n in tokens_by_lag.items() if lag <= max_lag)

    def drop(self, work: Work, num_generated: int) -> None:
        """Count a group that is never trained, of which `num_generated` tokens were sampled."""
        if work.is_counted:
            self.num_settled += 1
            self.generated_tokens += num_generated

    def figures(self, duration: float, groups_per_step: int, max_lag: int) -> Figures:
        """Return the figures of a window that lasted `duration`."""
        num_tokens = self.tokens_by_lag.total()
        num_violating = sum(count for lag, count in self.tokens_by_lag.items() if lag > max_lag)
        mean_length = self.counted_tokens / self.num_counted
        ideal_tokens = duration * groups_per_step * mean_length
        return Figures(
            violations=num_violating / num_tokens,
            idle=self.waited / duration,
            share=self.in_bound_tokens / self.generated_tokens,
            length_bias=self.full_tokens_of_trained / max(1, self.num_trained) / mean_length,
            mean_lag=sum(lag * count for lag, count in self.tokens_by_lag.items()) / num_tokens,
            pace=(num_tokens - num_violating) / ideal_tokens,
        )
