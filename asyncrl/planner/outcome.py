"""Outcome of a simulated run, in the words and units of the metrics (pure)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

BATCH_STEPS = 6
"""After so many steps one knows little of those before it."""
MIN_BATCHES, MAX_BATCHES = 4, 20


@dataclass(frozen=True)
class Outcome:
    """Figures of the steps after the warm-up.

    Attributes:
        step_s: Mean of `timing_s/step`; step_times_s: of each. noise: The relative standard error of
            step_s, or of trained_per_s if that is larger.
        learner_idle: Share of the time that the learner waited for a batch.
        replica_idle: Share of the replicas' time without a request in flight.
        lags: Share of trained tokens, by lag; lag_mean of them.
        masked_share: Of sampled tokens of trained groups, over the bound.
        dropped_groups: Per trained group.
        tokens_per_s: That the learner computes on, prompts and masked ones included. trained_per_s: Of
            answers, those that train. sampled_per_s: By the replicas, for training.
        buffer_load: Share of the time that the buffer's one thread works; buffer_ops_per_s.
        sync_s: A transfer and the longest swap, as `weights/transfer_s` and `weights/apply_s` have them.
        spread_s: From a publish to the last replica that serves it, as a mean: with waits, and swaps in turn.
        parts_per_step: In which batches came; overlapped_s: the learner's work on all but the last of a step.
        stall_share: Of the time, the learner stood still for a checkpoint; num_skipped of them were left out.
        num_evaluations: That ended, else those under way at the end; evaluation_s: from the order to the end
            of one, as a mean.
        residue: Of the ledger's accounting laws; 0 if they hold.
        num_events: Of the simulation.
    """

    num_steps: int
    step_s: float
    step_times_s: tuple[float, ...]
    learner_idle: float
    replica_idle: float
    lags: Mapping[int, float]
    lag_mean: float
    masked_share: float
    dropped_groups: float
    tokens_per_s: float
    sampled_per_s: float
    trained_per_s: float
    buffer_load: float
    buffer_ops_per_s: float
    sync_s: float
    spread_s: float
    tokens_per_step: float
    residue: int
    num_events: int
    virtual_s: float
    noise: float = 0.0
    parts_per_step: float = 1.0
    overlapped_s: float = 0.0
    stall_share: float = 0.0
    num_skipped: int = 0
    num_evaluations: int = 0
    evaluation_s: float = 0.0
    notes: Mapping[str, str] = field(default_factory=dict)

    def as_values(self) -> dict[str, Any]:
        """Return plain values."""
        values = dict(vars(self))
        values["lags"] = {str(lag): share for lag, share in sorted(self.lags.items())}
        values["step_times_s"] = list(self.step_times_s)
        values["notes"] = dict(self.notes)
        return values


def noise_of_mean(values: Sequence[float], period: int = 1) -> float:
    """Return the relative standard error of the mean of values that depend on those before them.

    It is taken from means of batches, which are whole periods where there are enough values.

    >>> noise_of_mean([1.0, 1.0, 1.0, 1.0])
    0.0
    """
    size = max(min(BATCH_STEPS, len(values) // MIN_BATCHES), len(values) // MAX_BATCHES, 1)
    whole = -(-size // max(1, period)) * max(1, period)
    size = whole if len(values) >= MIN_BATCHES * whole else size
    means = [fmean(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
    if len(means) < 2:
        return 1.0  # nobody knows
    return stdev(means) / math.sqrt(len(means)) / max(1e-9, fmean(means))


def noise_of_ratio(tops: Sequence[float], bottoms: Sequence[float], period: int = 1) -> float:
    """Return the relative standard error of the sum of `tops` over that of `bottoms`, both above 0.

    >>> noise_of_ratio([1.0, 5.0, 2.0, 4.0], [2.0, 10.0, 4.0, 8.0])
    0.0
    """
    top, bottom = max(1e-9, fmean(tops)), max(1e-9, fmean(bottoms))
    return noise_of_mean([1.0 + a / top - b / bottom for a, b in zip(tops, bottoms, strict=True)], period)


def share_by_lag(tokens: Counter[int]) -> tuple[dict[int, float], float]:
    """Return the share of tokens by lag, and the mean lag."""
    total = max(1, tokens.total())
    shares = {lag: count / total for lag, count in sorted(tokens.items())}
    return shares, sum(lag * share for lag, share in shares.items())
