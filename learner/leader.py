"""Rank 0's decisions: what the learner does next, as a stream of orders.

  consumes: the buffer's answers, the publisher's free buffers     waits for: a complete batch
  unblocked by: a reservation, a freed buffer, the stop event      produces: orders for every rank
It never waits for replicas: weights that find no free buffer stay unpublished and the newest go as
soon as there is one. Invariant: an order is given only once; a batch counts as trained only after
every rank has trained it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from asyncrl.buffer.client import LearnerClient
from asyncrl.config.tree import Config
from asyncrl.faults import fault_point
from learner.checkpoint import CheckpointStore, Commit
from learner.orders import Checkpoint, Finish, Order, Publish, Restore, Train, Wait
from weight_sync.handoff import Handoff

log = logging.getLogger(__name__)

RESERVE_WAIT_S = 0.5
UNPUBLISHED_WAIT_S = 0.01
LAST_PUBLISH_S = 30.0


class Leader:
    """Gives orders. `orders` is a generator: it goes on when the order it gave has been performed."""

    def __init__(
        self, config: Config, client: LearnerClient, connect: Callable[[int], Handoff], store: CheckpointStore
    ) -> None:
        self._config = config
        self._client = client
        self._connect = connect
        self._handoff: Handoff | None = None
        self._store = store
        self.step = 0
        self.wait_s = 0.0
        self.stale_tickets: list[int] = []
        self.last_evaluation = 0
        self._published_step = -1
        self._checkpointed_step = 0
        self._token = 0

    @property
    def token(self) -> int:
        return self._token

    @property
    def handoff(self) -> Handoff:
        """The way to the publisher; there is one once `Restore` was given."""
        assert self._handoff is not None, "the leader has not opened yet"
        return self._handoff

    def orders(self, stop: threading.Event) -> Iterator[Order]:
        """Yield orders until the steps are done or `stop` is set; then checkpoint and finish."""
        yield self._restore()
        yield from self._publish()
        while self.step < self._config.learner.steps and not stop.is_set():
            order = self._next_batch()
            if isinstance(order, Train):
                yield order
                self._book_trained(order)
                yield from self._checkpoint_if(self.step % self._config.checkpoint.every_steps == 0)
            else:
                yield order
            yield from self._publish()
        yield from self._checkpoint_if(self.step > self._checkpointed_step)
        yield from self._publish_last()
        yield Finish(is_complete=self.step >= self._config.learner.steps)

    def take_wait_s(self) -> float:
        """Return the seconds waited for batches since the last call."""
        waited, self.wait_s = self.wait_s, 0.0
        return waited

    def _restore(self) -> Restore:
        opened = self._client.open("learner")
        self._token = opened.token
        self._handoff = self._connect(opened.token)
        commits = [Commit(found.token, found.step, found.digest) for found in opened.checkpoints]
        commit = self._store.newest_valid(commits, log.warning)
        self.step = self._checkpointed_step = commit.step if commit else 0
        if opened.steps_trained or commit:
            self._client.resume(self.step)
            log.info("resumed at step %d; %d steps had been trained", self.step, opened.steps_trained)
        return Restore(self.step)

    def _publish(self) -> Iterator[Publish]:
        if self._published_step == self.step or not self.handoff.has_room():
            return
        fault_point("learner.publishing", self.step)
        number = self._client.register_version(self.step)
        yield Publish(number, self.step)
        self._published_step = self.step
        fault_point("learner.published", self.step)
        every = self._config.eval.every_steps
        if every and (self.step % every == 0 or self.step == self._config.learner.steps):
            self.last_evaluation = self._client.request_evaluation(self.step)

    def _publish_last(self) -> Iterator[Publish]:
        """The last weights must go out: the final evaluation and the next start count on them."""
        end = time.monotonic() + LAST_PUBLISH_S
        while self._published_step != self.step and time.monotonic() < end:
            yield from self._publish()
            time.sleep(UNPUBLISHED_WAIT_S)
        if self._published_step != self.step:
            log.warning("the weights of step %d found no free buffer in %g s", self.step, LAST_PUBLISH_S)

    def _next_batch(self) -> Train | Wait:
        is_published = self._published_step == self.step
        start = time.perf_counter()
        found = self._client.reserve(self.step, RESERVE_WAIT_S if is_published else UNPUBLISHED_WAIT_S)
        self.wait_s += time.perf_counter() - start
        if found is None:
            return Wait()
        fault_point("learner.reserved", self.step)
        return Train(
            step=self.step,
            token=self._token,
            tickets=[ticket.ticket for ticket in found.tickets],
            num_tokens=[ticket.num_tokens for ticket in found.tickets],
            versions=list(found.step_of_version.items()),
        )

    def _book_trained(self, order: Train) -> None:
        fault_point("learner.updated", order.step)
        self._client.trained(order.step, [(ticket, "stale") for ticket in self.stale_tickets])
        fault_point("learner.booked", order.step)
        self.step = order.step + 1

    def _checkpoint_if(self, is_due: bool) -> Iterator[Checkpoint]:
        if not is_due or self.step == self._checkpointed_step:
            return
        fault_point("checkpoint.begun", self.step)
        self._store.prepare(self.step)
        yield Checkpoint(self.step)
        digest = self._store.seal(self.step, self._token)
        kept = self._store.kept_after(self.step)
        self._client.checkpointed(self.step, digest, kept)
        fault_point("checkpoint.committed", self.step)
        self._store.remove_all_but(kept)
        self._checkpointed_step = self.step
