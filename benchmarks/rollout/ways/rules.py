"""Admission rules of a replica: fixed numbers, its own rule, and a controller."""

from __future__ import annotations

from typing import Protocol

GROUP_SIZE = 8
FULL = 0.9
"""Share of the KV cache from which on the controller takes no more groups in."""


class Gauges(Protocol):
    """Gauges of an engine."""

    @property
    def num_preempted(self) -> int:
        """Requests that lost their KV cache, since the start."""

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for a place in the batch."""

    @property
    def cache_use(self) -> float:
        """Share of the KV cache that is in use."""


class Fixed:
    """Holds a number of groups."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups

    def wants_more(self, num_groups: int, num_requests: int) -> bool:
        """Tell whether another group is taken, beside so many groups and unfinished requests."""
        return num_groups < self.num_groups

    def look(self, gauges: Gauges) -> None:
        """See what the engine tells: nothing here."""


class FullBatch(Fixed):
    """Holds as many groups as keep the batch full, by their unfinished requests: a replica's rule.

    A few requests wait inside the engine, so that its batch is full.
    """

    def __init__(self, max_sequences: int) -> None:
        super().__init__(0)
        self._full_batch = max_sequences * 5 // 4

    def wants_more(self, num_groups: int, num_requests: int) -> bool:
        return num_requests <= self._full_batch - GROUP_SIZE


class Adaptive(Fixed):
    """Holds a group more while the engine has room, and fewer when it preempts.

    It takes an eighth off at a preemption and adds one group per period else, unless requests wait or the
    cache is nearly full.
    """

    def __init__(self) -> None:
        super().__init__(2)
        self._num_preempted = 0

    def look(self, gauges: Gauges) -> None:
        """Read the engine's metrics and move the limit."""
        has_preempted = gauges.num_preempted > self._num_preempted
        self._num_preempted = gauges.num_preempted
        if has_preempted:
            self.num_groups = max(1, self.num_groups - max(1, self.num_groups // 8))
        elif not gauges.has_waiting and gauges.cache_use < FULL:
            self.num_groups += 1
