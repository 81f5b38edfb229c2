"""The closed form: what asynchrony gives at best, from the times of one step.

    speed-up = (tau g + t + s) / (max(g N / N_gen, t N / N_train) + s_exposed)

g and t are what a batch takes to generate and to train when all N cores do only that, tau is how much longer
the longest response of a batch is than the mean, s a weight sync that everyone waits for, s_exposed what the
learner waits for of one that runs beside it. A synchronous system on all N cores in turn (colocated) takes
the numerator; on N_gen and N_train cores of its own for each side (disaggregated) the g and t in it grow too.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.core.config.lengths import Lengths


@dataclass(frozen=True)
class Split:
    """Cores of both sides; in a disaggregated system they add up to `total`."""

    total: int = 2
    generating: int = 1
    training: int = 1


@dataclass(frozen=True)
class StepTimes:
    """Times of one step's parts, in seconds, on all cores.

    Attributes:
        generation_s: g, at the rate of a full engine.
        training_s: t.
        tail: tau, from 1.
        sync_s: s.
        exposed_sync_s: s_exposed.
    """

    generation_s: float
    training_s: float
    tail: float = 1.0
    sync_s: float = 0.0
    exposed_sync_s: float = 0.0


def colocated_s(times: StepTimes) -> float:
    """Return a synchronous step whose sides use all cores in turn."""
    return times.tail * times.generation_s + times.training_s + times.sync_s


def disaggregated_s(times: StepTimes, split: Split) -> float:
    """Return a synchronous step whose sides have cores of their own, idle in turn."""
    generation_s = times.generation_s * split.total / split.generating
    training_s = times.training_s * split.total / split.training
    return times.tail * generation_s + training_s + times.sync_s


def asynchronous_s(times: StepTimes, split: Split) -> float:
    """Return an asynchronous step: the slower side, and what of a sync is not hidden."""
    generation_s = times.generation_s * split.total / split.generating
    training_s = times.training_s * split.total / split.training
    return max(generation_s, training_s) + times.exposed_sync_s


def tail_factor(draws: Sequence[Sequence[int]]) -> float:
    """Return E[max] / E[mean] over batches of lengths.

    >>> tail_factor([[1, 3], [2, 2]])
    1.25
    """
    longest = statistics.fmean(max(lengths) for lengths in draws)
    return longest / statistics.fmean(statistics.fmean(lengths) for lengths in draws)


def draw_batches(lengths: Lengths, max_tokens: int, rows: int, batches: int = 100) -> list[list[int]]:
    """Return batches of response lengths of a distribution, the same at every call."""
    source = random.Random(0)

    def draw() -> int:
        return lengths.draw_tokens(source.getrandbits(48), max_tokens)

    return [[draw() for _ in range(rows)] for _ in range(batches)]
