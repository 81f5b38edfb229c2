"""What a simulated run says, in the words and units of the metrics (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Figures of the steps after the warm-up.

    Attributes:
        step_s: Mean of `timing_s/step`; step_times_s: of each.
        learner_idle: Share of the time that the learner waited for a batch.
        replica_idle: Share of the replicas' time without a request in flight.
        lags: Share of trained tokens, by lag; lag_mean of them.
        masked_share: Of sampled tokens of trained groups, over the bound.
        dropped_groups: Per trained group.
        tokens_per_s: Trained by the learner, prompts included. sampled_per_s: by the replicas, for training.
        buffer_load: Share of the time that the buffer's one thread works; buffer_ops_per_s.
        sync_s: From a publish to the last replica that serves it, as a mean.
        parts_per_step: In which batches came; overlapped_s: the learner's work on all but the last of a step.
        stall_share: Of the time, the learner stood still for a checkpoint; num_skipped of them were left out.
        num_evaluations: That ended, else those under way at the end; evaluation_s: from the order to the end
            of one, as a mean.
        residue: What does not add up in the ledger's account; 0.
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
    buffer_load: float
    buffer_ops_per_s: float
    sync_s: float
    tokens_per_step: float
    residue: int
    num_events: int
    virtual_s: float
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


def share_by_lag(tokens: Counter[int]) -> tuple[dict[int, float], float]:
    """Return the share of tokens by lag, and the mean lag."""
    total = max(1, tokens.total())
    shares = {lag: count / total for lag, count in sorted(tokens.items())}
    return shares, sum(lag * share for lag, share in shares.items())
