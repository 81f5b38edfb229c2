"""Fetcher of reserved tickets' payloads: each rank its own, by id, and only trainable groups."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.experience import Group

log = logging.getLogger(__name__)


class Source(Protocol):
    """Source of a step's groups."""

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """Return the groups of `tickets`, under the leader's fencing token."""


class BatchFetcher:
    """One rank's connection to the buffer.

    Args:
        prefetches: While a batch is trained, let as many of the next groups travel ahead. Only a rank
            that fetches whole batches knows which they will be.
    """

    def __init__(self, client: LearnerClient, prefetches: bool = False) -> None:
        self._client = client
        self._prefetches = prefetches

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """Return the groups of `tickets`, under the leader's fencing token."""
        if not tickets:
            return []
        self._client.token = token
        return self._client.fetch(tickets, prefetch=len(tickets) if self._prefetches else 0)


class FittingGroups:
    """A source without the groups that have a row longer than a microbatch: their tickets are dropped.

    The buffer refuses such rows. A journal may hold one of a run that had other limits, and the same batch
    comes again at every resume, so an error here would end the run for good.
    """

    def __init__(self, source: Source, max_tokens: int) -> None:
        self._source, self._max_tokens = source, max_tokens
        self._left_out: list[int] = []

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """Return the groups of `tickets` that fit, under the leader's fencing token."""
        groups = []
        for group in self._source.fetch(token, tickets):
            if group.longest_row <= self._max_tokens:
                groups.append(group)
                continue
            self._left_out.append(group.ticket)
            log.warning(
                "ticket %d is dropped: a row of %d tokens does not fit a microbatch of %d",
                group.ticket,
                group.longest_row,
                self._max_tokens,
            )
        return groups

    def take_left_out(self) -> list[int]:
        """Return the tickets that were left out since the last call."""
        left_out, self._left_out = self._left_out, []
        return left_out
