"""Groups that finish one by one, exactly when the learner asks: parts do not depend on luck of timing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from asyncrl.buffer.client import LearnerClient, ReplicaClient, Reservation
from asyncrl.buffer.messages import LeaseGrant
from tests.learner.guard.guarded_run import Run, make_pair


class Feeding:
    """The leader's way to the buffer; before each `reserve` one more group of the step is pushed.

    The newest of its groups finishes first, so that parts come against the order of tickets.

    Args:
        groups_per_step: Of the run.
        interrupt: Called with the run, the step and how many groups of it the learner has, before the
            next is reserved.
    """

    client: LearnerClient
    run: Run

    def __init__(self, groups_per_step: int, interrupt: Callable[[Run, int, int], None]) -> None:
        self._size, self._interrupt = groups_per_step, interrupt
        self._held: list[LeaseGrant] = []
        self._has_begun = False

    def over(self, client: LearnerClient) -> Feeding:
        """Return this, around `client`; `run` must be set before the learner begins."""
        self.client = client
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def reserve(
        self, step: int, wait_s: float, have: list[int] | None = None, at_least: int = 1, **more: Any
    ) -> Reservation | None:
        self._interrupt(self.run, step, len(have or ()))
        state = self.run.store.ledger.state
        num_reserved = len(state.by_step.get(step, ()))
        if num_reserved <= len(have or ()):  # what an earlier life has reserved comes first
            asyncio.run(self._push_one(self._size - num_reserved - len(state.stored)))
        return self.client.reserve(step, wait_s, have, at_least, **more)

    async def _push_one(self, want: int) -> None:
        with contextlib.closing(ReplicaClient(self.run.address, "sampler")) as replica:
            await self._push_one_as(replica, want)

    async def _push_one_as(self, replica: ReplicaClient, want: int) -> None:
        if not self._has_begun:
            await replica.deregister()
            await replica.describe_data(1000, "digest")
            self._has_begun = True
        version = self.run.store.ledger.state.versions.last_number
        if not self._held:
            self._held = list((await replica.lease(version, want, 0.0)).grants)
        if self._held:
            grant = self._held.pop()
            await replica.push(make_pair(grant.ticket, grant.attempt, version))
