"""The learner's leader: reserves, trains, books, publishes, checkpoints, has weights evaluated; after a
crash it resumes.

  consumes: batches, or their parts     waits for: a batch, a free buffer of the publisher, the checkpoint
  before, answers
  produces: versions, a `StepRecord` per step
Owns the timing; what is due after a step and how long a reservation waits are the rules of
`asyncrl.buffer.rules.learner`, which `learner.leader` follows.
Invariants: a batch counts as trained once the buffer has booked it; no token over the bound enters a step.
The weights are a digest of the batches that made them, so that two histories can be compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from asyncrl.buffer.ledger.events import UNSAID
from asyncrl.buffer.rules.learner import (
    is_checkpoint_due,
    is_evaluation_due,
    kept_checkpoints,
    must_resume,
    reserve_wait_s,
)
from asyncrl.buffer.rules.replica import RETRY_PAUSE_S
from asyncrl.planner.actors import buffer
from asyncrl.planner.actors.checkpoints import CheckpointSchedule
from asyncrl.planner.actors.record import StepRecord
from asyncrl.planner.actors.weights import PUBLISHER_NAME
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
from asyncrl.planner.world import Actor, Args, World

NAME = "learner.0"
START_DIGEST = 0


class LearnerActor(Actor):
    """See the module.

    Attributes:
        state: For the supervisor. records: Of all steps that this process has trained.
        is_busy: It computes. digest: Of the weights. schedule: Of its checkpoints.
    """

    def __init__(self, world: World, setting: Setting, rates: Rates, num_steps: int) -> None:
        super().__init__(world, NAME)
        self._setting, self._rates, self._num_steps = setting, rates, num_steps
        self._checkpoints: dict[int, int] = world.disk.setdefault(NAME, {0: START_DIGEST})
        self.state = "STARTING"
        self.step = 0
        self.records: list[StepRecord] = []
        self.is_busy = False
        self.digest = START_DIGEST
        self._token = 0
        self._published_step = -1
        self._num_looks = 0
        self._evaluated_step = -1
        self._committed: list[int] = []
        self.schedule = CheckpointSchedule(rates.checkpoint_s, rates.checkpoint_write_s, setting.max_stall_s)
        self._groups: list[Any] = []
        self._steps: dict[int, int] = {}
        self._num_parts = 0
        self._overlapped_s = 0.0
        self._wait_began: float | None = None
        self._wait_s = self._stall_s = 0.0
        self._step_began = world.now

    @property
    def is_in_part(self) -> bool:
        """Whether it has begun with a batch that is not whole yet."""
        return bool(self._groups)

    def begin(self) -> None:
        self._ask("open", {}, self._restore)

    def _restore(self, answer: Args) -> None:
        self._token = answer["token"]
        self._committed = sorted(step for _, step in answer["checkpoints"] if step in self._checkpoints)
        step = self._committed[-1] if self._committed else 0
        if must_resume(answer["steps_trained"], has_checkpoint=step > 0):
            self._ask("resume", {"token": self._token, "step": step}, lambda _: self._stand_at(step))
        else:
            self._stand_at(step)

    def _stand_at(self, step: int) -> None:
        self.step, self.digest = step, self._checkpoints[step]
        self._evaluated_step = step - 1
        self.state = "READY"
        self._step_began = self.world.now
        self._publish()

    # Publish

    def _publish(self) -> None:
        """Hand the newest weights over if there is room; else go on, and try again after the next look."""
        if self._published_step == self.step:
            self._next()
            return
        args = {"token": self._token}
        self.call(PUBLISHER_NAME, "acquire", args, self._hear_room, self._setting.pace.call_deadline_s)

    def _hear_room(self, answer: Args | None) -> None:
        if answer is not None and answer.get("is_fenced"):
            self._fall("a newer token publishes")
        elif answer is None or not answer["has_room"]:
            self._num_looks += 1
            self._next()
        else:
            self._ask("register_version", {"token": self._token, "step": self.step}, self._hear_number)

    def _hear_number(self, answer: Args) -> None:
        self.is_busy = True
        self.after(self._rates.publish_s, self._hand_over, answer["number"])

    def _hand_over(self, number: int) -> None:
        self.is_busy = False
        args = {"token": self._token, "number": number, "step": self.step}
        self.call(PUBLISHER_NAME, "publish", args, self._hear_taken, self._setting.pace.call_deadline_s)

    def _hear_taken(self, answer: Args | None) -> None:
        if answer is not None and answer.get("is_fenced"):
            self._fall("a newer token publishes")
            return
        if answer is None or not answer["is_taken"]:
            self._next()
            return
        self._published_step, self._num_looks = self.step, 0
        self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        """Order the evaluation of the published weights if one fell due since the last publish."""
        before, self._evaluated_step = self._evaluated_step, self.step
        if is_evaluation_due(self.step, before, self._setting.eval_every):
            args = {"token": self._token, "step": self.step}
            self._ask("request_evaluation", args, lambda _: self._next())
        else:
            self._next()

    # Train

    def _next(self) -> None:
        if self.step >= self._num_steps:
            self.state = "ENDED"
            self.world.note("ended", step=self.step)
            return
        if self._wait_began is None:
            self._wait_began = self.world.now
        is_published = self._published_step == self.step
        wait_s = reserve_wait_s(0 if is_published else max(1, self._num_looks))
        if is_published:
            wait_s = max(wait_s, self._setting.pace.reserve_wait_s)
        have = [group[0] for group in self._groups] if self._setting.streams else None
        args = {"token": self._token, "step": self.step, "wait_s": wait_s, "have": have}
        args["at_least"] = self._setting.least_part
        self._ask("reserve", args, self._hear_batch)

    def _hear_batch(self, answer: Args) -> None:
        groups = answer["groups"]
        if not groups:
            self._publish()
            return
        if self._wait_began is not None:
            self._wait_s += self.world.now - self._wait_began
            self._wait_began = None
        self._groups += groups
        self._steps |= answer["steps"]
        self._num_parts += 1
        is_last = answer["is_whole"]
        seconds = self._rates.learner_part_s(sum(group[1] for group in groups), is_last)
        self.is_busy = True
        if is_last:
            self.after(seconds, self._trained)
        else:
            self._overlapped_s += seconds
            self.after(seconds, self._end_part)

    def _end_part(self) -> None:
        """Go on with the next part: the weights have not changed, but may still wait to be published."""
        self.is_busy = False
        self._publish()

    def _trained(self) -> None:
        self.is_busy = False
        record, dropped = StepRecord(self.step, sum(group[1] for group in self._groups)), []
        for ticket, _, spans in self._groups:
            if not record.count(spans, self._steps, self._setting.ledger.max_lag):
                dropped.append((ticket, "stale"))
        record.num_stale_groups, record.num_parts = len(dropped), self._num_parts
        record.overlapped_s = self._overlapped_s
        self.digest = zlib.crc32(repr([group[0] for group in self._groups]).encode(), self.digest)
        self._groups, self._steps, self._num_parts, self._overlapped_s = [], {}, 0, 0.0
        args = {
            "token": self._token,
            "step": self.step,
            "dropped": dropped,
            "lag_max": max(record.lags, default=UNSAID),
        }
        self._ask("trained", args, lambda _: self._book(record))

    def _book(self, record: StepRecord) -> None:
        now = self.world.now
        record.ended, record.step_s = now, now - self._step_began
        record.wait_s, self._wait_s = self._wait_s, 0.0
        record.stall_s, self._stall_s = self._stall_s, 0.0
        self._step_began = now
        self.records.append(record)
        self.world.note("step", record=record, digest=self.digest, token=self._token)
        self.step += 1
        self._await_checkpoint()

    # Checkpoints

    def _await_checkpoint(self) -> None:
        """Commit what was written meanwhile; where one is due, wait for the one before."""
        schedule = self.schedule
        is_due = is_checkpoint_due(self.step, self._setting.checkpoint_every)
        if not schedule.is_writing:
            self._checkpoint_if(is_due)
            return
        wait_s, is_written = schedule.wait_s(is_due, self.world.now)
        self._stall_s += wait_s
        if is_written:
            self._pause(wait_s, self._commit, is_due)
        else:
            schedule.num_skipped += is_due
            self._pause(wait_s, self._publish)

    def _commit(self, is_due: bool) -> None:
        step, digest = self.schedule.take_written()
        self._checkpoints[step] = digest
        kept = kept_checkpoints(step, self._committed, self._setting.checkpoints_kept)
        args = {"token": self._token, "step": step, "digest": str(digest), "kept": kept}

        def hear(_: Args) -> None:
            self._committed = kept
            self._checkpoint_if(is_due)

        self._ask("checkpointed", args, hear)

    def _checkpoint_if(self, is_due: bool) -> None:
        if not is_due:
            self._publish()
            return
        self.schedule.begin(self.step, self.digest, self.world.now)
        self._stall_s += self.schedule.copy_s
        self.is_busy = True
        self._pause(self.schedule.copy_s, self._end_copy)

    def _end_copy(self) -> None:
        self.is_busy = False
        self._publish()

    def _pause(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        if seconds > 0:
            self.after(seconds, call, *args)
        else:
            call(*args)

    def _fall(self, reason: str) -> None:
        """End: somebody else is the learner."""
        self.state = "fenced"
        self.world.note("fenced", name=self.name, life=self.life, reason=reason)
        self.world.kill(self.name)

    def _ask(self, op: str, args: Args, then: Callable[[Args], None]) -> None:
        """Ask the buffer until it answers."""

        def hear(answer: Args | None) -> None:
            if answer is None:
                self.after(RETRY_PAUSE_S, self._ask, op, args, then)
            elif answer.get("is_fenced"):
                self._fall(answer["error"])
            else:
                assert "error" not in answer, answer["error"]
                then(answer)

        wait_s = args.get("wait_s", 0.0)
        self.call(buffer.NAME, op, args, hear, wait_s + self._setting.pace.call_deadline_s)
