"""Rank 0's decisions: what the learner does next, as a stream of orders.

  consumes: batches, publishes and checkpoints that are due, the guard's verdicts
  waits for: a complete batch, or part     unblocked by: a reservation, a freed buffer, the stop event
  produces: orders for every rank
Invariants: an order is given only once; a batch counts as trained only after every rank has trained it and
the guard has let it pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.rules import learner as rules
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, LedgerError
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.status.service import GuardFinding
from learner.checkpoint import CheckpointStore, Commit, Cut
from learner.guard.watch import Watch
from learner.leader.batches import BatchReserver
from learner.leader.checkpoints import CheckpointManager
from learner.leader.publishing import PolicyPublisher
from learner.orders import Finish, Order, Publish, Restore, StepOutcome, Train, Wait
from learner.report.waits import BUFFER, PAUSED, Waits
from weight_sync.publisher_client import PublisherClient

log = logging.getLogger(__name__)

PAUSED_WAIT_S = 0.5
"""Longest sleep of a paused leader before it gives the next order."""


class Leader:
    """Gives orders. `orders` is a generator: it goes on when the order it gave has been performed.

    `is_paused` may be set, and `ask_checkpoint` called, from other threads. They are heeded between two
    orders; a step that has begun is finished.

    Attributes:
        step: Steps that are booked.
        outcome: Of the last trained step: rank 0's service sets it before it asks for the next order.
        torn: A warning about each checkpoint that the run could not go on from.
    """

    def __init__(
        self,
        config: Config,
        client: LearnerClient,
        connect: Callable[[int], PublisherClient],
        store: CheckpointStore,
        world_size: int = 1,
        runtime: Runtime | None = None,
    ) -> None:
        runtime = runtime or ThreadRuntime()
        self._config = config
        self._client = client
        self._connect = connect
        self.waits = Waits(runtime)
        self._watch = Watch(config.guard, config.rollout.quantization or config.model.dtype)
        self.checkpoints = CheckpointManager(
            config.checkpoint, store, client, self._make_cut, world_size, self.waits, runtime
        )
        self.publishing = PolicyPublisher(config, client, self.checkpoints.note_scores, self.waits, runtime)
        self._batches = BatchReserver(config, client, self.waits, runtime)
        self._called = runtime.event()
        self._is_paused = False
        self.step = 0
        self.outcome = StepOutcome()
        self.torn: list[str] = []
        self._token = 0

    @property
    def token(self) -> int:
        return self._token

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._called.set()

    def ask_checkpoint(self, step: int) -> None:
        """Have a checkpoint of `step` or a later one written. Any thread may ask."""
        self.checkpoints.asked_step = step
        self._called.set()

    def orders(self, stop: Event) -> Iterator[Order]:
        """Yield orders until the steps are done or `stop` is set; then checkpoint and finish.

        Raises:
            UnstableTraining: The guard stops the run.
        """
        stop.on_set(self._called.set)
        yield from self._restore()
        yield from self._publish()
        while self.step < self._config.learner.steps and not stop.is_set():
            order = self._next_batch()
            yield order
            if isinstance(order, Train) and order.is_last:
                yield from self._settle(order.step, self._batches.end_step())
            # Within a step too: its weights do not change before its end, which a pause may put off.
            yield from self.checkpoints.write_if_asked(self.step)
            yield from self._publish()
        yield from self.checkpoints.write_last(self.step)
        yield from self.publishing.publish_last(self.step, self.outcome.seen_ids)
        self.checkpoints.finish_last()
        yield Finish(is_complete=self.step >= self._config.learner.steps)

    @property
    def findings(self) -> tuple[GuardFinding, ...]:
        """Findings of the guard; see `Watch.findings`. May be asked from other threads."""
        return self._watch.findings

    def judge(self, step: int, metrics: Mapping[str, float], num_refused: int) -> dict[str, float]:
        """Let the guard look at the metrics of `step`, before it is booked; return the guard's own."""
        return self._watch.judge(step, metrics, num_refused)

    def _restore(self) -> Iterator[Order]:
        opened = self._client.open("learner")
        self._token = opened.token
        self.publishing.open(self._connect(opened.token))
        known = [Commit(found.token, found.step, found.digest) for found in opened.checkpoints]
        self.checkpoints.open(opened.token, known)
        refused: list[str] = []
        commit = self.checkpoints.find_newest(refused.append)
        step = commit.step if commit else 0
        self._watch.restore(self.checkpoints.state(commit, "guard"), opened.note)
        if rules.must_resume(opened.steps_trained, has_checkpoint=commit is not None):
            self._resume(step, refused)
            log.info("resumed at step %d; %d steps had been trained", step, opened.steps_trained)
        refused += self.checkpoints.find_unknown(step)
        self.torn = [f"{why}; going on from step {step}" for why in refused]
        for sentence in self.torn:
            log.warning("%s", sentence)
        yield from self._stand_at(commit)
        # Without a checkpoint there would be nothing to go back to.
        yield from self.checkpoints.write_if(self._watch.may_roll_back and commit is None, self.step)

    def _resume(self, step: int, refused: Sequence[str]) -> None:
        """Have the ledger go back to `step`. Steps before a rollback are trained again with what it changed.

        Raises:
            ConfigError: It cannot go back to the beginning, and no checkpoint is whole.
        """
        try:
            self._client.resume(step, is_fork=step < self._watch.rolled_back_to)
        except LedgerError as error:
            if not refused:
                raise
            raise ConfigError(
                f"no checkpoint that the journal knows can be loaded: {'; '.join(refused)}",
                hint="Restore one of these checkpoints, or choose another run.name",
            ) from error

    def _stand_at(self, commit: Commit | None) -> Iterator[Order]:
        """Take up the weights of `commit`, which the ledger has gone back to."""
        self.step = commit.step if commit else 0
        self.checkpoints.stand_at(commit)
        self.publishing.stand_at(self.step)
        controllers = self.checkpoints.state(commit, "objective")
        yield Restore(self.step, has_checkpoint=commit is not None, controllers=controllers)
        if self._watch.has_changed:
            yield self._watch.adjustment()

    def _publish(self) -> Iterator[Publish]:
        return self.publishing.publish(self.step, self.outcome.seen_ids)

    def _next_batch(self) -> Train | Wait:
        if self.is_paused and not self._batches.is_within_step:
            with self.waits.on(PAUSED):
                self._called.wait(PAUSED_WAIT_S)
                self._called.clear()  # the announced requests are handled before the next wait for a batch
            return Wait()
        order = self._batches.reserve(self.step, self._token, self._watch.limits(), self.publishing.client)
        if order is None:
            self.publishing.publish_again_if_lost(self.step)
            return Wait()
        return order

    def _settle(self, step: int, num_groups: int) -> Iterator[Order]:
        """Apply the guard's verdict on a trained batch: book it, or roll back to before it."""
        self._watch.raise_if_stopped(step)
        if self._watch.wants_rollback:
            yield from self._roll_back(step, num_groups)
            return
        self._book_trained(step)
        if self._watch.take_change():
            yield self._watch.adjustment()
        is_due = rules.is_checkpoint_due(self.step, self._config.checkpoint.every_steps)
        yield from self.checkpoints.write_if(is_due, self.step)

    def _roll_back(self, step: int, num_groups: int) -> Iterator[Order]:
        """Go back the way a resume does. The batch at hand was not booked: it is reserved again."""
        # Committed later, the checkpoint that is being written would be one of an abandoned branch.
        self.checkpoints.finish()
        commit = self.checkpoints.find_to_roll_back(self._watch.rolled_back_to)
        if commit is None:
            raise self._watch.no_checkpoint(step)
        num_trainable = num_groups - self.outcome.num_untrainable
        offenders = self._watch.offenders(self.outcome.refused_tickets, num_trainable)
        self._watch.roll_back(step, commit.step, offenders)
        note = self._watch.state()
        self._client.resume(commit.step, is_fork=not offenders, note=note, refused=offenders)
        fault_point("learner.rolled_back", commit.step)
        yield from self._stand_at(commit)

    def _book_trained(self, step: int) -> None:
        fault_point("learner.updated", step)
        with self.waits.on(BUFFER):
            self._client.trained(step, self.outcome.dropped, self.outcome.lag_max)
        fault_point("learner.booked", step)
        self.step = step + 1

    def _make_cut(self) -> Cut:
        controllers = {"guard": self._watch.state(), "objective": self.outcome.controllers}
        return Cut(self.publishing.number, controllers)
