"""Publishes of a run: which weights go out, when, under which number, and the evaluations of them.

  consumes: the publisher's free buffers     waits for: at the end of the run, one of them
  produces: `Publish` orders; evaluations asked of the buffer
Replicas are never waited for: weights that find no free buffer stay unpublished and the newest go as soon as
there is one. Invariant: a step that is due for an evaluation gets one, at the first weights that are
published from it on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.rules.learner import Publishing
from asyncrl.core.config.tree import Config
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Runtime
from learner.orders import Publish
from learner.report.waits import BUFFER, PUBLISHER, Waits
from weight_sync.publisher_client import PublisherClient

log = logging.getLogger(__name__)

LAST_PUBLISH_S = 30.0


class PolicyPublisher:
    """Rank 0's account of publishes.

    Args:
        note_scores: Reads the scores of past evaluations; called after each new request, because the
            status lists the newest evaluations only.

    Attributes:
        number: Of the policy version that was ordered last, 0 for none.
        last_evaluation: Id of the evaluation that was asked for last, 0 for none.
        has_lost_stripe: A publisher has lost its stripe of the newest weights; set by rank 0's service.
    """

    def __init__(
        self,
        config: Config,
        client: LearnerClient,
        note_scores: Callable[[], None],
        waits: Waits,
        runtime: Runtime,
    ) -> None:
        self._client = client
        self._note_scores = note_scores
        self._waits = waits
        self._runtime = runtime
        self._publisher_client: PublisherClient | None = None
        self._rules = Publishing(config.eval.every_steps, config.learner.steps)
        self.number = 0
        self.last_evaluation = 0
        self.has_lost_stripe = False

    def open(self, publisher_client: PublisherClient) -> None:
        """Publish by way of `publisher_client` from now on."""
        self._publisher_client = publisher_client

    @property
    def client(self) -> PublisherClient:
        """The way to the publisher; there is one once `Restore` was given."""
        assert self._publisher_client is not None, "the leader has not opened yet"
        return self._publisher_client

    def stand_at(self, step: int) -> None:
        """Take up the weights of `step`, of which nothing is published yet."""
        self._rules.stand_at(step)

    def publish(self, step: int, seen_ids: list[int]) -> Iterator[Publish]:
        """Order a publish of the weights of `step` unless they are out, or no buffer is free."""
        if not self._rules.is_due(step):
            return
        with self._waits.on(PUBLISHER):
            has_room = self.client.has_room()
        if not has_room:
            return
        fault_point("learner.publishing", step)
        with self._waits.on(BUFFER):
            self.number = self._client.register_version(step)
        yield Publish(self.number, step, self.client.shared_path, seen_ids, self.client.token)
        taken = self.client.published
        if taken is None or taken.number != self.number:
            return  # the publisher has died meanwhile; the next try gets another number
        is_evaluation_due = self._rules.take(step)
        fault_point("learner.published", step)
        if is_evaluation_due:
            self.request_evaluation(step)

    def publish_last(self, step: int, seen_ids: list[int]) -> Iterator[Publish]:
        """Order the last publish, once there is room: the final evaluation and the next start count on it."""
        end = self._runtime.now() + LAST_PUBLISH_S
        yield from self.publish(step, seen_ids)
        while self._rules.is_due(step) and self._runtime.now() < end:
            self.client.await_room()
            yield from self.publish(step, seen_ids)
        if self._rules.is_due(step):
            log.warning("the weights of step %d found no free buffer in %g s", step, LAST_PUBLISH_S)

    def publish_again_if_lost(self, step: int) -> None:
        """Have lost weights published again: without a batch, replicas may be waiting for them."""
        if self._rules.is_due(step):
            return
        with self._waits.on(PUBLISHER):
            if not (self.has_lost_stripe or self.client.has_lost()):
                return
        self.has_lost_stripe = False
        log.warning("the publisher has lost the weights of step %d: they are published again", step)
        self._rules.lose()

    def request_evaluation(self, step: int) -> None:
        """Have the weights of `step` evaluated."""
        with self._waits.on(BUFFER):
            self.last_evaluation = self._client.request_evaluation(step)
        self._note_scores()
