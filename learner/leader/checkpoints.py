"""Checkpoints of a run: which ones the journal knows, when the next is due, why one could not be written.

  consumes: the store's folders, sealed checkpoints, requests    waits for: the checkpoint before
  produces: `Checkpoint` orders; commits in the journal
A checkpoint that cannot be written ends no run: one of a later step is tried, until the run itself ends.
Invariants: one is committed only after every rank has written it; none is written twice for the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.config.tree import CheckpointSection
from asyncrl.core.errors import CheckpointError
from asyncrl.core.obstacle import Cause, FailureStreak
from asyncrl.core.runtime.interface import Runtime
from learner.checkpoint import CheckpointStore, Commit, Cut
from learner.checkpoint.writer import WRITE_DEADLINE_S, CheckpointKeeper
from learner.orders import Checkpoint
from learner.report.waits import BUFFER, CHECKPOINT, Waits

log = logging.getLogger(__name__)

WRITE_AGAIN_S = 10.0
"""From a checkpoint that could not be written to the next try: it costs a copy of the state."""


class CheckpointManager:
    """Rank 0's account of checkpoints.

    Args:
        make_cut: Returns the state of the cut besides that of the ranks.

    Attributes:
        asked_step: A checkpoint of it, or of a later step, was asked for; None once it is ordered.
        failures: Writes that failed since the last one that did not.
    """

    def __init__(
        self,
        section: CheckpointSection,
        store: CheckpointStore,
        client: LearnerClient,
        make_cut: Callable[[], Cut],
        world_size: int,
        waits: Waits,
        runtime: Runtime,
    ) -> None:
        self._section = section
        self._store = store
        self._client = client
        self._make_cut = make_cut
        self._waits = waits
        self._runtime = runtime
        self.keeper = CheckpointKeeper(
            store,
            self._commit,
            world_size,
            max_stall_s=section.max_stall_s,
            best_metric=section.best_metric,
            committed=lambda: [commit.step for commit in self._commits],
            runtime=runtime,
        )
        self.asked_step: int | None = None
        self.failures = FailureStreak(Cause.CHECKPOINT_FAILS)
        self._token = 0
        self._commits: list[Commit] = []
        self._written_step = -1
        self._unwritten: CheckpointError | None = None
        self._write_again_at = 0.0

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint that the journal knows, 0 without one."""
        return max((commit.step for commit in self._commits), default=0)

    @property
    def oldest_kept_step(self) -> int:
        """Oldest step to roll back to: 0 (the initial model) until `checkpoint.keep` are kept."""
        is_full = len(self._commits) >= self._section.keep
        return min(commit.step for commit in self._commits) if is_full else 0

    # --- going back -----------------------------------------------------------------------

    def open(self, token: int, known: Sequence[Commit]) -> None:
        """Begin with the checkpoints that the journal knows; `token` is that of new ones."""
        self._token, self._commits = token, list(known)

    def find_newest(self, warn: Callable[[str], None]) -> Commit | None:
        """Return the newest checkpoint that is whole; `warn` is told of each that is not."""
        return self._store.newest_valid(self._commits, warn)

    def find_to_roll_back(self, rolled_back_to: int) -> Commit | None:
        """Return the checkpoint to roll back to, after an earlier rollback to `rolled_back_to`."""
        commits, newest = self._commits, self.newest_step
        if newest <= rolled_back_to:  # the newest one did not help: an older one, if there is any
            commits = [commit for commit in commits if commit.step < newest] or commits
        return self._store.newest_valid(commits, log.warning)

    def find_unknown(self, step: int) -> list[str]:
        """Return a warning about complete checkpoints later than `step` that the journal does not know."""
        known = {commit.step for commit in self._commits}
        unknown = [found for found in self._store.steps() if found > step and found not in known]
        if not unknown:
            return []
        which = f"step{'s'[: len(unknown) > 1]} {', '.join(map(str, unknown))}"
        why = "not committed, or the journal lost the commits"
        return [f"the journal does not know the checkpoints of {which} in {self._store.root}: {why}"]

    def state(self, commit: Commit | None, name: str) -> Mapping[str, float]:
        """Return the state called `name` that the cut of `commit` holds, empty without one."""
        return self._store.cut(commit.step).controllers.get(name, {}) if commit else {}

    def stand_at(self, commit: Commit | None) -> None:
        """Forget checkpoints after `commit`: an abandoned branch, or files that cannot be loaded."""
        step = commit.step if commit else 0
        self._commits = [known for known in self._commits if known.step <= step]
        self._written_step = step if commit else -1

    # --- writing --------------------------------------------------------------------------

    def write_if(self, is_due: bool, step: int) -> Iterator[Checkpoint]:
        """Order a checkpoint of `step` if it is due or one failed, and the one before leaves room."""
        self._commit_finished()
        if not (is_due or self._is_to_be_written_again) or step == self._written_step:
            return
        with self._waits.on(CHECKPOINT):
            is_begun = self._has_room() and self._begin(step)
        if not is_begun:
            return
        yield Checkpoint(step)
        self.keeper.seal_in_background(step, self._token, self._make_cut())
        self._written_step = step

    def write_if_asked(self, step: int) -> Iterator[Checkpoint]:
        """Order a requested checkpoint once no write is in progress; never wait for it.

        After a rollback: once the step of the request has been trained again.
        """
        is_free, asked = self._commit_finished(), self.asked_step
        if is_free and asked is not None and asked <= step:
            self.asked_step = None
            yield from self.write_if(True, step)

    def write_last(self, step: int) -> Iterator[Checkpoint]:
        """Order one of the last step, unless there is one or nothing was trained."""
        self.finish()
        yield from self.write_if(step > max(self._written_step, 0), step)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, commit it; raise CheckpointError if that hangs."""
        with self._waits.on(CHECKPOINT):
            is_written = self._commit_finished(WRITE_DEADLINE_S)
        if not is_written:
            raise CheckpointError(f"a checkpoint was not written within {WRITE_DEADLINE_S:g} s")

    def finish_last(self) -> None:
        """Finish, and raise CheckpointError if the newest one could not be written."""
        self.finish()
        if self._unwritten is not None:
            raise self._unwritten

    def note_scores(self) -> None:
        """Score the weights that were evaluated meanwhile: the buffer tells of the newest only."""
        if self._section.keep_best:
            for found in self._client.status().evaluations:
                self.keeper.note_metrics(found.step, found.metrics)

    @property
    def _is_to_be_written_again(self) -> bool:
        return self._unwritten is not None and self._runtime.now() >= self._write_again_at

    def _has_room(self) -> bool:
        try:
            return self.keeper.has_room()
        except CheckpointError as error:
            return self._note_unwritten(error)

    def _begin(self, step: int) -> bool:
        try:
            self.keeper.begin(step)
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
        self._written_step = -1
        return False

    def _commit(self, step: int, digest: str, kept: Sequence[int]) -> None:
        """Register a sealed checkpoint with the journal, and score checkpoints evaluated meanwhile."""
        with self._waits.on(BUFFER):
            self._client.checkpointed(step, digest, kept)
        fresh = [*self._commits, Commit(self._token, step, digest)]
        self._commits = [commit for commit in fresh if commit.step in kept]
        self._unwritten = None
        self.failures.succeed()
        self.note_scores()
