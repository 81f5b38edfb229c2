"""Admission rules of a replica: fixed numbers, a full batch, and its own limit."""

from __future__ import annotations

from asyncrl.buffer.rules.replica import count_free_groups, count_max_groups
from asyncrl.core.status.replica import CacheStatus
from rollout_service.replica.concurrency import Limit

GROUP_SIZE = 8


class Fixed:
    """Holds a number of groups."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups

    def wants_more(self, num_groups: int, num_requests: int) -> bool:
        """Tell whether another group is taken, beside so many groups and unfinished requests."""
        return num_groups < self.num_groups

    def look(self, cache: CacheStatus, num_requests: int, num_ended: int) -> None:
        """See what the engine tells when a request has ended: nothing here."""


class FullBatch(Fixed):
    """Holds as many groups as keep the batch full, by their unfinished requests.

    A few requests wait inside the engine, so that its batch is full.
    """

    def __init__(self, max_sequences: int) -> None:
        super().__init__(0)
        self.limit = Limit.at_bound(count_max_groups(max_sequences, GROUP_SIZE) * GROUP_SIZE, GROUP_SIZE)

    def wants_more(self, num_groups: int, num_requests: int) -> bool:
        return count_free_groups(self.limit.places, GROUP_SIZE, num_requests) > 0


class Adaptive(FullBatch):
    """A replica's rule: a full batch, until the engine preempts."""

    def look(self, cache: CacheStatus, num_requests: int, num_ended: int) -> None:
        self.limit = self.limit.step(cache, num_requests, num_ended)
