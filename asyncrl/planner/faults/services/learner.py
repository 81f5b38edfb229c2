"""A learner's process: what its leader does with the buffer, the publisher and its checkpoints.

    consumes: batches    waits for: a complete batch, a step's time
    produces: weights, versions, checkpoints, orders to evaluate

As in `learner.leader`: weights that find no free segment stay unpublished, a batch counts as trained once the
buffer has booked it, and after any failure the process ends and the next one resumes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.core.errors import DeadlineExceeded, LedgerError, SegmentGone, SyncError
from asyncrl.core.experience import Group, decode_group
from asyncrl.core.rpc import Reply
from asyncrl.core.staleness import is_over_age, lag
from asyncrl.planner.faults.checks.observer import Observer
from asyncrl.planner.faults.checks.truth import ROOT
from asyncrl.planner.faults.kernel.process import Connection, Process, Switchboard
from asyncrl.planner.faults.sync.content import NUM_BUCKETS, TOTAL_BYTES, bucket_of, manifest_of
from weight_sync.memory import segments

CALL_S, RESERVE_WAIT_S, MARGIN_S, UNPUBLISHED_WAIT_S = 30.0, 0.5, 5.0, 0.05
ASK_S = 1.0
ACQUIRE_S, COMMIT_S, REPEAT_PAUSE_S, AWAY_S = 3.0, 5.0, 0.2, 60.0
COPY_S, LAST_PUBLISH_S = 0.06, 30.0


@dataclass
class Checkpoint:
    """A folder on the disk. `is_whole`: every byte of it is what its digest says."""

    node: int
    digest: str
    is_whole: bool = True


@dataclass(frozen=True)
class LearnerPlan:
    """What a learner is like.

    Attributes:
        num_steps: Of the run. step_s: Of one. checkpoint_every: Steps. kept: Checkpoints.
        rollbacks: Steps before whose booking the guard goes back, the first time that they are reached.
        is_forking: It trains otherwise after it went back; else it refuses a group of the step.
        is_streaming: It takes its batch in parts, as groups finish.
        evaluate_every: Steps between evaluations, 0 for none.
    """

    num_steps: int
    max_lag: int
    step_s: float
    checkpoint_every: int
    checkpoint_s: float
    kept: int
    start_s: float
    rollbacks: frozenset[int] = frozenset()
    is_forking: bool = False
    is_streaming: bool = False
    evaluate_every: int = 0


@dataclass
class LearnerDisk:
    """What outlives learners: checkpoints by step, and the weights that the run ended with."""

    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    last_node: int = ROOT


class LearnerProcess(Process):
    """See the module."""

    def __init__(
        self,
        board: Switchboard,
        plan: LearnerPlan,
        disk: LearnerDisk,
        observer: Observer,
        prompt_of: Callable[[int], Hashable],
    ) -> None:
        super().__init__(board, "learner.0")
        self._plan, self._disk, self._observer, self._prompt_of = plan, disk, observer, prompt_of
        self._buffer = Connection(self, "buffer.0")
        self._publisher = Connection(self, "publisher.0")
        self._token = 0
        self._node = ROOT
        self._note: dict[str, float] = {}
        self._commits: dict[int, str] = {}
        self._sealed: list[tuple[int, str]] = []
        self._is_writing = False
        self._published_step = self._checkpointed_step = -1
        self._published_number = 0
        self._evaluated_step = -1
        self._away_since: float | None = None
        self.step = self.last_evaluation = 0

    def begin(self) -> None:
        """Resume, then train."""
        self.spawn(self._live())

    async def _live(self) -> None:
        await self.sleep(self._plan.start_s)
        await self._restore()
        self.state = "READY"
        await self._publish()
        while self.step < self._plan.num_steps:
            await self._commit_sealed()
            await self._train_step()
            await self._publish()
        end = self.now + LAST_PUBLISH_S
        while self._published_step != self.step and self.now < end:
            await self._publish()
            await self.sleep(UNPUBLISHED_WAIT_S)
        while self._is_writing:
            await self.sleep(UNPUBLISHED_WAIT_S)
        await self._commit_sealed()
        self._disk.last_node = self._node
        self.state = "ENDED"

    # --- calls ------------------------------------------------------------------------------------

    async def _call(self, op: str, **args: Any) -> Reply:
        """Call the buffer, again if the connection breaks."""
        end = self.now + CALL_S
        while True:
            try:
                return await self._buffer.call(op, (), max(0.0, end - self.now), **args)
            except DeadlineExceeded:
                if self.now >= end:
                    raise
                await self.sleep(REPEAT_PAUSE_S)

    async def _restore(self) -> None:
        opened = (await self._call("open", holder=self.name)).args
        self._token = opened["token"]
        await self._open_publisher()
        self._commits = {one["step"]: one["digest"] for one in opened["checkpoints"]}
        self._note = dict(opened["note"])
        step = self._newest_valid()
        if opened["steps_trained"] or step:
            # Steps before a rollback are trained again with what it changed: no replay.
            is_fork = step < self._note.get("rolled_back_to", 0)
            await self._call("resume", token=self._token, step=step, is_fork=is_fork, note={}, refused=[])
        self._stand_at(step)

    async def _open_publisher(self) -> None:
        while True:
            try:
                await self._publisher.call("open", (), CALL_S, token=self._token)
                return
            except DeadlineExceeded:
                await self.sleep(REPEAT_PAUSE_S)

    def _newest_valid(self) -> int:
        for step in sorted(self._commits, reverse=True):
            found = self._disk.checkpoints.get(step)
            if found is not None and found.is_whole and found.digest == self._commits[step]:
                return step
        return 0

    def _stand_at(self, step: int) -> None:
        self._commits = {at: digest for at, digest in self._commits.items() if at <= step}
        self._node = self._disk.checkpoints[step].node if step else ROOT
        self.step, self._published_step, self._checkpointed_step = step, -1, step
        self._evaluated_step = step - 1

    # --- a step -----------------------------------------------------------------------------------

    async def _train_step(self) -> None:
        wait_s = RESERVE_WAIT_S if self._published_step == self.step else UNPUBLISHED_WAIT_S
        groups: list[Group] = []
        steps: dict[int, int] = {}
        while not await self._take_part(wait_s, groups, steps):
            if not groups:
                await self._publish_again_if_lost()
                return
        await self.sleep(self._plan.step_s)
        if await self._roll_back_if_due([group.ticket for group in groups]):
            return
        await self._book(groups, steps)
        if self.step % self._plan.checkpoint_every == 0:
            self._begin_checkpoint()

    async def _take_part(self, wait_s: float, groups: list[Group], steps: dict[int, int]) -> bool:
        """Take in the batch, or the next part of it; return whether that is all. `groups` is emptied if the
        step must be begun anew, because a payload of it is lost.
        """
        have = [group.ticket for group in groups] if self._plan.is_streaming else None
        try:
            found = await self._reserve(wait_s, have)
        except LedgerError:
            if not groups:
                raise
            groups.clear()
            return False
        if found is None:
            return False
        tickets = [row["ticket"] for row in found["tickets"]]
        fetched = await self._call("fetch", token=self._token, tickets=tickets)
        if fetched.args["lost"]:
            groups.clear()
            return False
        groups += _cut(fetched, len(tickets))
        steps |= dict(found["versions"])
        return bool(found["whole"])

    async def _reserve(self, wait_s: float, have: list[int] | None) -> dict[str, Any] | None:
        args = {"token": self._token, "step": self.step, "wait_s": wait_s, "have": have}
        try:
            reply = await self._buffer.call("reserve", (), wait_s + MARGIN_S, **args)
        except DeadlineExceeded:
            self._away_since = self.now if self._away_since is None else self._away_since
            if self.now - self._away_since > AWAY_S:
                raise
            await self.sleep(REPEAT_PAUSE_S)
            return None
        self._away_since = None
        return reply.args if reply.args["ready"] else None

    async def _book(self, groups: Sequence[Group], steps: dict[int, int]) -> None:
        max_lag, step = self._plan.max_lag, self.step
        is_masked = {number: is_over_age(step, counted, max_lag) for number, counted in steps.items()}
        branch = int(self._note.get("branch", 0))
        node = self._observer.trained(
            step, self._node, groups, is_masked.__getitem__, self._prompt_of, branch
        )
        stale, lag_max = [], 0
        for group in groups:
            used = {span.version for one in group.trajectories for span in one.spans}
            lags = [lag(step, steps[number]) for number in used if not is_masked[number]]
            lag_max = max([lag_max, *lags])
            stale += [] if lags else [[group.ticket, "stale"]]
        await self._call("trained", token=self._token, step=step, dropped=stale, lag_max=lag_max)
        self._node, self.step = node, step + 1

    async def _roll_back_if_due(self, tickets: Sequence[int]) -> bool:
        if self.step not in self._plan.rollbacks or f"at_{self.step}" in self._note:
            return False
        while self._is_writing:
            await self.sleep(UNPUBLISHED_WAIT_S)
        await self._commit_sealed()
        step, is_forking = self._newest_valid(), self._plan.is_forking
        branch = self._note.get("branch", 0.0) + is_forking
        self._note |= {f"at_{self.step}": 1.0, "rolled_back_to": float(step), "branch": branch}
        refused = [] if is_forking else [tickets[0]]
        await self._call(
            "resume", token=self._token, step=step, is_fork=is_forking, note=self._note, refused=refused
        )
        self._stand_at(step)
        return True

    # --- weights ----------------------------------------------------------------------------------

    async def _publish_again_if_lost(self) -> None:
        if self._published_step != self.step:
            return
        try:
            current = await self._publisher.call("current", (), ASK_S)
        except DeadlineExceeded:
            return
        if current.args["number"] < self._published_number:
            self._published_step = -1

    async def _publish(self) -> None:
        if self._published_step == self.step:
            return
        try:
            acquired = await self._publisher.call(
                "acquire", (), ACQUIRE_S, token=self._token, num_bytes=TOTAL_BYTES
            )
        except DeadlineExceeded:
            return
        path = acquired.args["path"]
        if not path:
            return
        number = (await self._call("register_version", token=self._token, step=self.step)).args["number"]
        if await self._write(path) and await self._commit(path, number):
            self._published_step, self._published_number = self.step, number
            await self._evaluate_if_due()

    async def _evaluate_if_due(self) -> None:
        every = self._plan.evaluate_every
        if not every:
            return
        is_due = self.step // every > self._evaluated_step // every
        if is_due or self.step == self._plan.num_steps:
            self.last_evaluation = (
                await self._call("request_evaluation", token=self._token, step=self.step)
            ).args["id"]
        self._evaluated_step = self.step

    async def _write(self, path: str) -> bool:
        try:
            memory = segments.attach(path, TOTAL_BYTES)
        except SegmentGone:
            return False
        size = TOTAL_BYTES // NUM_BUCKETS
        for index in range(NUM_BUCKETS):
            await self.sleep(COPY_S / NUM_BUCKETS)
            memory[index * size : (index + 1) * size] = bucket_of(self._node, index)
        return True

    async def _commit(self, path: str, number: int) -> bool:
        frames = [manifest_of(number, self.step, self._node).to_bytes()]
        for _ in range(2):
            try:
                await self._publisher.call("commit", frames, COMMIT_S, token=self._token, path=path)
                return True
            except SegmentGone:
                return False
            except DeadlineExceeded:
                continue
            except SyncError:
                raise
        return False

    # --- checkpoints ------------------------------------------------------------------------------

    def _begin_checkpoint(self) -> None:
        if not self._is_writing and not self._sealed and self.step != self._checkpointed_step:
            self._is_writing, self._checkpointed_step = True, self.step
            self.spawn(self._seal(self.step, self._node))

    async def _seal(self, step: int, node: int) -> None:
        await self.sleep(self._plan.checkpoint_s)
        digest = hashlib.blake2b(f"{step}/{node}/{self._token}".encode(), digest_size=8).hexdigest()
        self._disk.checkpoints[step] = Checkpoint(node, digest)
        self._sealed.append((step, digest))
        self._is_writing = False

    async def _commit_sealed(self) -> None:
        while self._sealed:
            step, digest = self._sealed.pop()
            if step > self.step:
                continue
            kept = sorted({*self._commits, step})[-self._plan.kept :]
            await self._call("checkpointed", token=self._token, step=step, digest=digest, kept=kept)
            self._commits = {at: known for at, known in {**self._commits, step: digest}.items() if at in kept}
            for old in [at for at in self._disk.checkpoints if at not in kept and at < step]:
                del self._disk.checkpoints[old]


def _cut(fetched: Reply, num_groups: int) -> list[Group]:
    counts, frames, at = fetched.args["frames_per_group"], fetched.frames, 0
    groups = []
    for count in counts[:num_groups]:
        groups.append(decode_group(frames[at : at + count]))
        at += count
    return groups
