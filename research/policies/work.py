"""The nouns of the queueing model: its shape, a group on its way, and which version sampled what (pure).

Time is counted in learner steps: an update takes 1. A slot samples `TOKENS_PER_STEP` tokens in that
time, whatever the others do. Weights are live everywhere the moment their step is trained; version
`n` has seen `n - 1` steps.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.core.staleness import Span

TOKENS_PER_STEP = 1000
"""Tokens that one slot samples while the learner makes one update."""


@dataclass(frozen=True)
class Shape:
    """The queue.

    Attributes:
        groups_per_step: Groups that a step trains.
        slots: Groups that the replicas sample at once.
        max_lag: The bound.
        ready_batches: `staleness.ready_batches`; of our policies.
        max_wait: `staleness.max_wait_s`, in learner steps; of our policy `wait`.
    """

    groups_per_step: int
    slots: int
    max_lag: int
    ready_batches: int = 1
    max_wait: float = 1.0


@dataclass(slots=True)
class Work:
    """One group, from its admission on.

    Attributes:
        number: Its name at the rule that admitted it.
        num_tokens: Its length if it is not ended early.
        started: When its first token was begun.
        start_step: Steps that the weights had seen by then.
        is_counted: It belongs to the cohort whose fate is measured.
    """

    number: int
    num_tokens: int
    started: float
    start_step: int
    is_counted: bool = False

    @property
    def end(self) -> float:
        return self.started + self.num_tokens / TOKENS_PER_STEP

    def tokens_by(self, time: float) -> int:
        """Return how many tokens are sampled at `time`."""
        return min(self.num_tokens, max(0, int((time - self.started) * TOKENS_PER_STEP)))


def spans_of(work: Work, published: Sequence[float]) -> tuple[Span, ...]:
    """Return the spans of a finished group.

    Args:
        published: When the weights of each step so far went live; the first at time 0.
    """
    first = work.start_step + 1
    last = bisect.bisect_left(published, work.end)
    spans, start = [], 0
    for version in range(first, last + 1):
        end = work.tokens_by(published[version]) if version < last else work.num_tokens
        if end > start:
            spans.append(Span(version, start, end))
            start = end
    return tuple(spans)
