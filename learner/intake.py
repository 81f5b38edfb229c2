"""Fetching the payload of reserved tickets: each rank its own, by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncrl.buffer.client import LearnerClient
from asyncrl.experience import Group


class Source(Protocol):
    """Where a step's groups come from."""

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """Return the groups of `tickets`, under the leader's fencing token."""


class Intake:
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
