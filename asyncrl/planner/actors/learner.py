"""The learner's leader: reserves, trains, books, publishes, checkpoints, has weights evaluated.

  consumes: batches, or their parts     waits for: a batch, a free buffer of the publisher, the checkpoint
  before, answers
  produces: versions, a `StepRecord` per step
Owns the timing; what is due after a step, when weights are published and how long a reservation waits are the
rules of `asyncrl.buffer.rules.learner`, which `learner.leader` follows.
Invariants: a batch counts as trained once the buffer has booked it; no token over the bound enters a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.buffer.ledger.events import UNSAID
from asyncrl.buffer.rules.learner import Publishing, is_checkpoint_due, kept_checkpoints
from asyncrl.planner.actors import buffer
from asyncrl.planner.actors.record import StepRecord
from asyncrl.planner.actors.weights import PUBLISHER_NAME
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import NEVER, Setting
from asyncrl.planner.world import Actor, Args, World

NAME = "learner.0"


class LearnerActor(Actor):
    """See the module.

    Attributes:
        state: For the supervisor. schedule: Of its checkpoints.
    """

    def __init__(self, world: World, setting: Setting, rates: Rates, num_steps: int) -> None:
        super().__init__(world, NAME)
        self._setting, self._rates, self._num_steps = setting, rates, num_steps
        self.state = "STARTING"
        self.step = 0
        self._token = 0
        self._publishing = Publishing(setting.eval_every)
        self._committed: list[int] = []
        self.schedule = CheckpointSchedule(rates.checkpoint_s, rates.checkpoint_write_s, setting.max_stall_s)
        self._groups: list[Any] = []
        self._steps: dict[int, int] = {}
        self._num_parts = 0
        self._num_reserved = self._reserving = 0
        self._overlapped_s = 0.0
        self._wait_began: float | None = None
        self._wait_s = self._stall_s = 0.0
        self._step_began = world.now

    def begin(self) -> None:
        self._ask("open", self._begin)

    def _begin(self, answer: Args) -> None:
        self._token = answer["token"]
        self.state = "READY"
        self._step_began = self.world.now
        self._publishing.stand_at(self.step)
        self._publish()

    # Publish

    def _publish(self) -> None:
        """Hand the newest weights over if there is room; else go on, and try again once there is."""
        if self._publishing.is_due(self.step):
            self.call(PUBLISHER_NAME, "acquire", {}, self._hear_room)
        else:
            self._next()

    def _hear_room(self, answer: Args) -> None:
        if answer["has_room"]:
            self._ask("register_version", self._hear_number, step=self.step)
        else:
            self.call(PUBLISHER_NAME, "await_room", {}, self._hear_free)
            self._next()

    def _hear_free(self, _: Args) -> None:
        """Publish now if only the batch is awaited; its answer is asked for again then."""
        if self._reserving:
            self._reserving = 0
            self._publish()

    def _hear_number(self, answer: Args) -> None:
        self.after(self._rates.publish_s, self._hand_over, answer["number"])

    def _hand_over(self, number: int) -> None:
        self.call(PUBLISHER_NAME, "publish", {"number": number, "step": self.step}, self._hear_taken)

    def _hear_taken(self, _: Args) -> None:
        if self._publishing.take(self.step):
            self._ask("request_evaluation", lambda _: self._next(), step=self.step)
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
        self._num_reserved += 1
        self._reserving = self._num_reserved
        have = [group[0] for group in self._groups] if self._setting.streams else None
        least = self._setting.least_part
        hear = partial(self._hear_batch, self._reserving)
        self._ask("reserve", hear, step=self.step, wait_s=NEVER, have=have, at_least=least)

    def _hear_batch(self, number: int, answer: Args) -> None:
        if number != self._reserving:  # given up for room
            return
        self._reserving, groups = 0, answer["groups"]
        if self._wait_began is not None:
            self._wait_s += self.world.now - self._wait_began
            self._wait_began = None
        self._groups += groups
        self._steps |= answer["steps"]
        self._num_parts += 1
        is_last = answer["is_whole"]
        seconds = self._rates.learner_part_s(sum(group[1] for group in groups), is_last)
        if is_last:
            self.after(seconds, self._trained)
        else:
            self._overlapped_s += seconds
            self.after(seconds, self._end_part)

    def _end_part(self) -> None:
        """Go on with the next part: the weights have not changed, but may still wait to be published."""
        self._publish()

    def _trained(self) -> None:
        record, dropped = StepRecord(self.step, sum(group[1] for group in self._groups)), []
        for ticket, _, spans in self._groups:
            if not record.count(spans, self._steps, self._setting.ledger.max_lag):
                dropped.append((ticket, "stale"))
        record.num_stale_groups, record.num_parts = len(dropped), self._num_parts
        record.overlapped_s = self._overlapped_s
        self._groups, self._steps, self._num_parts, self._overlapped_s = [], {}, 0, 0.0
        lag_max = max(record.lags, default=UNSAID)
        self._ask("trained", lambda _: self._book(record), step=self.step, dropped=dropped, lag_max=lag_max)

    def _book(self, record: StepRecord) -> None:
        now = self.world.now
        record.ended, record.step_s = now, now - self._step_began
        record.wait_s, self._wait_s = self._wait_s, 0.0
        record.stall_s, self._stall_s = self._stall_s, 0.0
        self._step_began = now
        self.world.note("step", record=record)
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
        step = self.schedule.take_written()
        self._committed = kept_checkpoints(step, self._committed, self._setting.checkpoints_kept)
        self._ask("checkpointed", lambda _: self._checkpoint_if(is_due), step=step, kept=self._committed)

    def _checkpoint_if(self, is_due: bool) -> None:
        if not is_due:
            self._publish()
            return
        self.schedule.begin(self.step, self.world.now)
        self._stall_s += self.schedule.copy_s
        self._pause(self.schedule.copy_s, self._publish)

    def _pause(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        if seconds > 0:
            self.after(seconds, call, *args)
        else:
            call(*args)

    def _ask(self, op: str, then: Callable[[Args], None], **args: Any) -> None:
        self.call(buffer.NAME, op, {"token": self._token, **args}, then)


class CheckpointSchedule:
    """Timing of a learner's checkpoints: the end of each write, and the wait for it.

    Owns no time: it is an argument. As in production one checkpoint is written at a time, beside training;
    only the copy to the host, and the wait for the one before, hold the learner up.

    Args:
        copy_s: The learner stands still for it. write_s: From there until it is written.
        max_stall_s: That training waits for the checkpoint before, at most.

    Attributes:
        num_skipped: That were due while the one before was still being written.
    """

    def __init__(self, copy_s: float, write_s: float, max_stall_s: float) -> None:
        self.copy_s, self._write_s = copy_s, write_s
        self._max_stall_s = max_stall_s
        self._writing: int | None = None
        self._written_at = 0.0
        self.num_skipped = 0

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def wait_s(self, is_due: bool, now: float) -> tuple[float, bool]:
        """Return how long training waits for the checkpoint before, and whether it is written then."""
        left_s = max(0.0, self._written_at - now) if self.is_writing else 0.0
        patience_s = self._max_stall_s if is_due else 0.0
        return min(left_s, patience_s), left_s <= patience_s

    def begin(self, step: int, now: float) -> None:
        """Take a checkpoint: from `copy_s` on it is written beside training."""
        assert self._writing is None, "one checkpoint is written at a time"
        self._writing, self._written_at = step, now + self.copy_s + self._write_s

    def take_written(self) -> int:
        """Return the step of what has been written."""
        written, self._writing = self._writing, None
        assert written is not None, "something was being written"
        return written
