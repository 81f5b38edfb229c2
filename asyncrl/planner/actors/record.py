"""Record of a simulated learner step: its time, and its tokens by lag (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.core.staleness import is_over_age, lag


@dataclass
class StepRecord:
    """One trained step.

    Attributes:
        ended: Virtual time. step_s: Since the end of the step before; wait_s of it for a batch, and
            stall_s for a checkpoint.
        num_tokens: Prompts included. lags: Trained tokens by lag; num_masked were over the bound.
        sampled_lags: Of all tokens of the batch, before any is masked.
        num_parts: In which the batch came. overlapped_s: Work on all of them but the last.
    """

    step: int
    num_tokens: int
    ended: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    stall_s: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    sampled_lags: Counter[int] = field(default_factory=Counter)
    num_masked: int = 0
    num_stale_groups: int = 0
    num_parts: int = 1
    overlapped_s: float = 0.0

    def count(self, spans: Counter[int], steps: Mapping[int, int], max_lag: int) -> int:
        """Sort a group's tokens by lag; return how many of them train.

        Args:
            spans: Tokens by version number. steps: What each of these counts as.
        """
        num_left = 0
        for number, num_tokens in spans.items():
            sampled = steps[number]
            self.sampled_lags[lag(self.step, sampled)] += num_tokens
            if is_over_age(self.step, sampled, max_lag):
                self.num_masked += num_tokens
            else:
                self.lags[lag(self.step, sampled)] += num_tokens
                num_left += num_tokens
        return num_left
