"""Adaptive concurrency of a replica: how many unfinished samples it holds, by its engine's KV cache (pure).

Owns the limit and no clock: what a look weighs is the share of the limit that has ended since the last one,
so that the estimate is that of a turnover, however long answers are. Invariants: no limit is over the bound
(a batch and a quarter; the buffer grants no more than the staleness bound admits) or under one group; an
engine that never preempts keeps the bound, since requests that wait in it take no cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from asyncrl.core.status.replica import CacheStatus

OVERCOMMIT = 1.25
"""Samples beside those that the KV cache holds: a quarter waits in the engine, as beside a full batch. vLLM
preempts the youngest, which has least to compute anew."""


class Change(StrEnum):
    """Reason of the last change of a limit.

    NONE: no preemption since the start. CUT: requests were preempted. TRIM, GROW: fewer or more fit.
    """

    NONE = "none"
    GROW = "grow"
    TRIM = "trim"
    CUT = "cut"


@dataclass(frozen=True)
class Limit:
    """Limit of unfinished samples, between one group of `least` samples and the `bound`.

    Attributes:
        in_cache, usage: Means over a turnover: samples in the KV cache, and the share of it in use.

    >>> start = Limit.at_bound(bound=40, least=8)
    >>> crowded = CacheStatus(preemptions=3, usage=1.0, running=20, waiting=20)
    >>> cut = start.step(crowded, num_unfinished=40, num_ended=4)
    >>> cut.samples, cut.change.value
    (25.0, 'cut')
    >>> calm = CacheStatus(preemptions=3, usage=0.5, running=19)
    >>> cut.step(calm, num_unfinished=19, num_ended=12).change.value
    'grow'
    """

    samples: float
    bound: int
    least: int
    change: Change = Change.NONE
    in_cache: float = 0.0
    usage: float = 0.0
    num_preempted: int = 0
    num_ended: int = 0

    @classmethod
    def at_bound(cls, bound: int, least: int) -> Limit:
        """Return the limit of a start."""
        return cls(bound, bound, least)

    @property
    def places(self) -> int:
        """Samples that may be unfinished; half a group more, since only whole groups are taken."""
        return min(self.bound, round(self.samples) + self.least // 2)

    def step(self, cache: CacheStatus, num_unfinished: int, num_ended: int) -> Limit:
        """Return the limit after a look at the engine.

        Args:
            num_unfinished: Samples in flight, those in a tool included.
            num_ended: Requests that have ended since the start.
        """
        has_preempted = cache.preemptions > self.num_preempted
        turnover = min(1.0, (num_ended - self.num_ended) / self.samples) if self.usage else 1.0
        seen = replace(self, num_preempted=cache.preemptions, num_ended=num_ended)
        if not (cache.running and cache.usage and num_unfinished):
            return seen
        in_cache = num_unfinished * cache.running / (cache.running + cache.waiting)
        in_cache = self.in_cache + turnover * (in_cache - self.in_cache)
        usage = self.usage + turnover * (cache.usage - self.usage)
        seen = replace(seen, in_cache=in_cache, usage=usage)
        wanted = in_cache * OVERCOMMIT
        fits = self.bound if wanted >= usage * self.bound else max(self.least, wanted / usage)
        if fits == self.samples or (self.change is Change.NONE and not has_preempted):
            return seen
        change = Change.GROW if fits > self.samples else Change.CUT if has_preempted else Change.TRIM
        return replace(seen, samples=fits, change=change)
