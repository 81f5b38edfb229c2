"""Rank 0's decisions: what the learner does next, as a stream of orders.

  consumes: the buffer's answers, the publisher's free buffers, the guard's verdicts
  waits for: a complete batch, or part     unblocked by: a reservation, a freed buffer, the stop event
  produces: orders for every rank
It never waits for replicas: weights that find no free buffer stay unpublished and the newest go as
soon as there is one. Invariants: an order is given only once; a batch counts as trained only after
every rank has trained it and the guard has let it pass; a step that is due for an evaluation gets one,
at the first weights published from it on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from asyncrl.buffer.client import LearnerClient, Reservation
from asyncrl.buffer.rules import learner as rules
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import CheckpointError, ConfigError, DeadlineExceeded, LedgerError
from asyncrl.core.obstacle import Cause, FailureStreak
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service_status import GuardFinding
from learner.checkpoint import CheckpointStore, Commit
from learner.checkpoint.store import Cut
from learner.checkpoint.writer import WRITE_DEADLINE_S, CheckpointKeeper
from learner.guard.watch import Watch
from learner.orders import Checkpoint, Finish, Order, Publish, Restore, Train, Wait
from learner.report.waits import BATCH, BUFFER, CHECKPOINT, PAUSED, PUBLISHER, Waits
from weight_sync.publisher_client import PublisherClient

log = logging.getLogger(__name__)

LAST_PUBLISH_S = 30.0
WRITE_AGAIN_S = 10.0
"""From a checkpoint that could not be written to the next try: it costs a copy of the state."""
PAUSED_WAIT_S = 0.5
"""For which the ranks stand still between two orders of a learner that is paused, if nobody calls."""


class Leader:
    """Gives orders. `orders` is a generator: it goes on when the order it gave has been performed.

    `is_paused` may be set, and `ask_checkpoint` called, from other threads. They are heeded between two
    orders; a step that has begun is finished.
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
        self._runtime = runtime or ThreadRuntime()
        self._called = self._runtime.event()
        self._config = config
        self._client = client
        self._connect = connect
        self._publisher_client: PublisherClient | None = None
        self._store = store
        self.torn: list[str] = []
        self.keeper = CheckpointKeeper(
            store,
            self._commit,
            world_size,
            max_stall_s=config.checkpoint.max_stall_s,
            best_metric=config.checkpoint.best_metric,
            committed=lambda: [commit.step for commit in self._commits],
            runtime=self._runtime,
        )
        self._watch = Watch(config.guard, config.model.dtype)
        self._commits: list[Commit] = []
        self.step = 0
        self.waits = Waits(self._runtime)
        self.stale_tickets: list[int] = []
        self.oversized_tickets: list[int] = []
        self.refused_tickets: list[int] = []
        self.lag_max = 0
        self.seen_ids: list[int] = []
        self.controllers: dict[str, float] = {}
        self.last_evaluation = 0
        self._is_paused = False
        self.asked_step: int | None = None
        self._away_since = 0.0
        self._taken: list[int] = []
        self._publishing = rules.Publishing(config.eval.every_steps, config.learner.steps)
        self._checkpointed_step = -1
        self.failures = FailureStreak(Cause.CHECKPOINT_FAILS)
        self._unwritten: CheckpointError | None = None
        self._write_again_at = 0.0
        self._number = 0
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
        self.asked_step = step
        self._called.set()

    @property
    def publisher_client(self) -> PublisherClient:
        """The way to the publisher; there is one once `Restore` was given."""
        assert self._publisher_client is not None, "the leader has not opened yet"
        return self._publisher_client

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
                num_groups, self._taken = len(self._taken), []
                yield from self._settle(order.step, num_groups)
            # Within a step too: its weights do not change before its end, which a pause may put off.
            yield from self._checkpoint_if_asked()
            yield from self._publish()
        self._finish_checkpoint()
        yield from self._checkpoint_if(self.step > max(self._checkpointed_step, 0))
        yield from self._publish_last()
        self._finish_checkpoint()
        if self._unwritten is not None:
            raise self._unwritten
        yield Finish(is_complete=self.step >= self._config.learner.steps)

    @property
    def checkpointed_step(self) -> int:
        """The step of the newest checkpoint that the journal knows, 0 without one."""
        return max((commit.step for commit in self._commits), default=0)

    @property
    def oldest_kept_step(self) -> int:
        """The oldest step to go back to: 0, the model of the start, until as many are kept as may be."""
        is_full = len(self._commits) >= self._config.checkpoint.keep
        return min(commit.step for commit in self._commits) if is_full else 0

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
        self._publisher_client = self._connect(opened.token)
        self._commits = [Commit(found.token, found.step, found.digest) for found in opened.checkpoints]
        refused: list[str] = []
        commit = self._store.newest_valid(self._commits, refused.append)
        step = commit.step if commit else 0
        kept = self._store.cut(step).controllers.get("guard", {}) if commit else {}
        self._watch.restore(kept, opened.note)
        if rules.must_resume(opened.steps_trained, has_checkpoint=commit is not None):
            self._resume(step, refused)
            log.info("resumed at step %d; %d steps had been trained", step, opened.steps_trained)
        refused += self._find_unknown(step)
        self.torn = [f"{why}; going on from step {step}" for why in refused]
        for sentence in self.torn:
            log.warning("%s", sentence)
        yield from self._stand_at(commit)
        # Without a checkpoint there would be nothing to go back to.
        yield from self._checkpoint_if(self._watch.may_roll_back and commit is None)

    def _find_unknown(self, step: int) -> list[str]:
        """Return a warning about complete checkpoints later than `step` that the journal does not know."""
        known = {commit.step for commit in self._commits}
        unknown = [found for found in self._store.steps() if found > step and found not in known]
        if not unknown:
            return []
        which = f"step{'s'[: len(unknown) > 1]} {', '.join(map(str, unknown))}"
        why = "they were not committed, or it has lost that since"
        return [f"the journal does not know the checkpoints of {which} in {self._store.root}: {why}"]

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
                hint="The groups before them are gone: put one back, or choose another run.name",
            ) from error

    def _stand_at(self, commit: Commit | None) -> Iterator[Order]:
        """Take up the weights of `commit`, which the ledger has gone back to."""
        step = commit.step if commit else 0
        # Later checkpoints belong to a branch that ends here, or cannot be loaded.
        self._commits = [known for known in self._commits if known.step <= step]
        self.step = step
        self._publishing.stand_at(step)
        self._checkpointed_step = step if commit else -1
        controllers = self._store.cut(step).controllers.get("objective", {}) if commit else {}
        yield Restore(step, has_checkpoint=commit is not None, controllers=controllers)
        if self._watch.has_changed:
            yield self._watch.adjustment()

    def _publish(self) -> Iterator[Publish]:
        if not self._publishing.is_due(self.step):
            return
        with self.waits.on(PUBLISHER):
            has_room = self.publisher_client.has_room()
        if not has_room:
            return
        fault_point("learner.publishing", self.step)
        with self.waits.on(BUFFER):
            self._number = self._client.register_version(self.step)
        yield Publish(self._number, self.step, self.publisher_client.shared_path, self.seen_ids)
        taken = self.publisher_client.published
        if taken is None or taken.number != self._number:
            return  # the publisher has died meanwhile; the next try gets another number
        is_evaluation_due = self._publishing.take(self.step)
        fault_point("learner.published", self.step)
        if is_evaluation_due:
            self._order_evaluation()

    def _order_evaluation(self) -> None:
        with self.waits.on(BUFFER):
            self.last_evaluation = self._client.request_evaluation(self.step)
        self._note_scores()  # by the next order a long list may no longer contain the one before

    def _publish_last(self) -> Iterator[Publish]:
        """The last weights must go out: the final evaluation and the next start count on them."""
        end = self._runtime.now() + LAST_PUBLISH_S
        yield from self._publish()
        while self._publishing.is_due(self.step) and self._runtime.now() < end:
            self.publisher_client.await_room()
            yield from self._publish()
        if self._publishing.is_due(self.step):
            log.warning("the weights of step %d found no free buffer in %g s", self.step, LAST_PUBLISH_S)

    def _next_batch(self) -> Train | Wait:
        if self.is_paused and not self._taken:
            with self.waits.on(PAUSED):
                self._called.wait(PAUSED_WAIT_S)
                self._called.clear()  # the announced requests are handled before the next wait for a batch
            return Wait()
        with self.waits.on(BATCH):
            found = self._reserve()
        if found is None:
            if not self._publishing.is_due(self.step):
                self._publish_again_if_lost()
            return Wait()
        fault_point("learner.reserved", self.step)
        tickets = [ticket.ticket for ticket in found.tickets]
        is_first, self._taken = not self._taken, [*self._taken, *tickets]
        return Train(
            step=self.step,
            token=self._token,
            tickets=tickets,
            num_tokens=[ticket.num_tokens for ticket in found.tickets],
            versions=list(found.step_of_version.items()),
            limits=self._watch.limits(),
            is_first=is_first,
            is_last=found.is_whole,
        )

    def _publish_again_if_lost(self) -> None:
        """Publish lost weights again: without a batch, replicas may be waiting for them."""
        with self.waits.on(PUBLISHER):
            if not self.publisher_client.has_lost():
                return
        log.warning("the publisher has lost the weights of step %d: they are published again", self.step)
        self._publishing.lose()

    def _reserve(self) -> Reservation | None:
        """Return the batch or its next part, or None: it is not complete, the publisher may have room for
        weights that wait for it, or the buffer is started again.

        Raises:
            DeadlineExceeded: The buffer has not answered for `launcher.start_deadline_s`.
        """
        learner = self._config.learner
        have = self._taken if learner.stream else None
        try:  # a part is shared by all data-parallel ranks
            found = self._client.reserve(
                self.step, rules.RESERVE_WAIT_S, have, at_least=learner.dp, until=self.publisher_client.room
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
        yield from self._checkpoint_if(is_due)

    def _roll_back(self, step: int, num_groups: int) -> Iterator[Order]:
        """Go back the way a resume does. The batch at hand was not booked: it is reserved again."""
        # Committed later, the checkpoint that is being written would be one of an abandoned branch.
        self._finish_checkpoint()
        commit = self._store.newest_valid(self._commits_to_go_back_to(), log.warning)
        if commit is None:
            raise self._watch.no_checkpoint(step)
        num_trainable = num_groups - len(self.stale_tickets) - len(self.oversized_tickets)
        offenders = self._watch.offenders(self.refused_tickets, num_trainable)
        self._watch.roll_back(step, commit.step, offenders)
        note = self._watch.state()
        self._client.resume(commit.step, is_fork=not offenders, note=note, refused=offenders)
        fault_point("learner.rolled_back", commit.step)
        yield from self._stand_at(commit)

    def _commits_to_go_back_to(self) -> list[Commit]:
        """Return all, but where the last rollback led to the newest one: it did not help, so the older."""
        newest = max((commit.step for commit in self._commits), default=0)
        if newest > self._watch.rolled_back_to:
            return self._commits
        return [commit for commit in self._commits if commit.step < newest] or self._commits

    def _book_trained(self, step: int) -> None:
        """Report the step. Groups that changed no weights are dropped, each with its reason."""
        dropped = dict.fromkeys(self.refused_tickets, "guard")
        dropped |= dict.fromkeys(self.oversized_tickets, "oversized")
        dropped |= dict.fromkeys(self.stale_tickets, "stale")
        fault_point("learner.updated", step)
        with self.waits.on(BUFFER):
            self._client.trained(step, list(dropped.items()), self.lag_max)
        fault_point("learner.booked", step)
        self.step = step + 1

    def _checkpoint_if(self, is_due: bool) -> Iterator[Checkpoint]:
        self._commit_finished()
        if not (is_due or self._is_to_be_written_again) or self.step == self._checkpointed_step:
            return
        with self.waits.on(CHECKPOINT):
            is_begun = self._has_room() and self._begin_checkpoint()
        if not is_begun:
            return
        yield Checkpoint(self.step)
        cut = Cut(self._number, {"guard": self._watch.state(), "objective": self.controllers})
        self.keeper.seal_in_background(self.step, self._token, cut)
        self._checkpointed_step = self.step

    @property
    def _is_to_be_written_again(self) -> bool:
        return self._unwritten is not None and self._runtime.now() >= self._write_again_at

    def _has_room(self) -> bool:
        try:
            return self.keeper.has_room()
        except CheckpointError as error:
            return self._note_unwritten(error)

    def _begin_checkpoint(self) -> bool:
        try:
            self.keeper.begin(self.step)
        except CheckpointError as error:
            return self._note_unwritten(error)
        return True

    def _commit_finished(self, wait_s: float = 0.0) -> bool:
        """Commit finished checkpoints; return whether no write is in progress."""
        try:
            return self.keeper.commit_finished(wait_s)
        except CheckpointError as error:
            self._note_unwritten(error)
            return True

    def _note_unwritten(self, error: CheckpointError) -> bool:
        """Take note that a checkpoint could not be written: training goes on, and a later step's is tried."""
        log.error("%s; it is tried again after a later step", error)
        self.failures.fail(error.message)
        self._unwritten = error
        self._write_again_at = self._runtime.now() + WRITE_AGAIN_S
        self._checkpointed_step = -1
        return False

    def _checkpoint_if_asked(self) -> Iterator[Checkpoint]:
        """Write one that was asked for, once the one before is done; nothing waits for that.

        After a rollback, once the step that was done when it was asked for is done again.
        """
        is_free, asked = self._commit_finished(), self.asked_step
        if is_free and asked is not None and asked <= self.step:
            self.asked_step = None
            yield from self._checkpoint_if(True)

    def _finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, commit it; raise CheckpointError if that hangs."""
        with self.waits.on(CHECKPOINT):
            is_written = self._commit_finished(WRITE_DEADLINE_S)
        if not is_written:
            raise CheckpointError(f"a checkpoint was not written within {WRITE_DEADLINE_S:g} s")

    def _commit(self, step: int, digest: str, kept: Sequence[int]) -> None:
        """Register a sealed checkpoint with the journal, and score checkpoints evaluated meanwhile."""
        with self.waits.on(BUFFER):
            self._client.checkpointed(step, digest, kept)
        fresh = [*self._commits, Commit(self._token, step, digest)]
        self._commits = [commit for commit in fresh if commit.step in kept]
        self._unwritten = None
        self.failures.succeed()
        self._note_scores()

    def _note_scores(self) -> None:
        """Score the weights that were evaluated meanwhile: the buffer tells of the newest only."""
        if self._config.checkpoint.keep_best:
            for found in self._client.status().evaluations:
                self.keeper.note_metrics(found.step, found.metrics)
