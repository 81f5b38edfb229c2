"""Reservations of a step's batch, whole or in parts.

  consumes: the buffer's reservations     waits for: a complete batch, or part
  unblocked by: a reservation, a freed buffer of the publisher     produces: `Train` orders
Invariant: a step's parts are disjoint, and the buffer is told of all before the next one is reserved.
"""

from __future__ import annotations

import logging

from asyncrl.buffer.client import LearnerClient, Reservation
from asyncrl.buffer.rules.learner import RESERVE_WAIT_S
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Runtime
from learner.guard.guard import Limits
from learner.orders import Train
from learner.report.waits import BATCH, Waits
from weight_sync.publisher_client import PublisherClient

log = logging.getLogger(__name__)


class BatchReserver:
    """Tickets that the step in progress has taken, and how long the buffer has been away."""

    def __init__(self, config: Config, client: LearnerClient, waits: Waits, runtime: Runtime) -> None:
        self._config = config
        self._client = client
        self._waits = waits
        self._runtime = runtime
        self._taken: list[int] = []
        self._away_since = 0.0

    @property
    def is_within_step(self) -> bool:
        """Whether a part of a batch was taken and the last one was not."""
        return bool(self._taken)

    def reserve(
        self, step: int, token: int, limits: Limits, publisher_client: PublisherClient
    ) -> Train | None:
        """Return the order to train the batch of `step` or its next part.

        None: it is not complete, the publisher may have room for weights that wait for it, or the buffer is
        started again.

        Raises:
            DeadlineExceeded: The buffer has not answered for `launcher.start_deadline_s`.
        """
        with self._waits.on(BATCH):
            found = self._ask(step, publisher_client)
        if found is None:
            return None
        fault_point("learner.reserved", step)
        tickets = [ticket.ticket for ticket in found.tickets]
        is_first, self._taken = not self._taken, [*self._taken, *tickets]
        return Train(
            step=step,
            token=token,
            tickets=tickets,
            num_tokens=[ticket.num_tokens for ticket in found.tickets],
            versions=list(found.step_of_version.items()),
            limits=limits,
            is_first=is_first,
            is_last=found.is_whole,
        )

    def end_step(self) -> int:
        """End the step whose last part was trained; return how many groups it had."""
        num_groups, self._taken = len(self._taken), []
        return num_groups

    def _ask(self, step: int, publisher_client: PublisherClient) -> Reservation | None:
        learner = self._config.learner
        have = self._taken if learner.stream else None
        try:  # a part is shared by all data-parallel ranks
            found = self._client.reserve(
                step, RESERVE_WAIT_S, have, at_least=learner.dp, until=publisher_client.room
            )
        except DeadlineExceeded as error:
            now = self._runtime.now()
            self._away_since = self._away_since or now
            if now - self._away_since > self._config.launcher.start_deadline_s:
                raise
            log.warning("the buffer is away: %s", error.message)
            return None
        self._away_since = 0.0
        return found
