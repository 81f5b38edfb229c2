"""The learner's leader: reserves, trains, books, publishes, checkpoints; after a crash it resumes.

  consumes: batches     waits for: a complete batch, a free buffer of the publisher, answers
  produces: versions, a `StepRecord` per step
Invariants: a batch counts as trained once the buffer has booked it; no token over the bound enters a step.
The weights are a digest of the batches that made them, so that two histories can be compared.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.sim.actors import buffer
from asyncrl.sim.actors.weights import PUBLISHER_NAME
from asyncrl.sim.rates import Rates
from asyncrl.sim.setting import NEVER, Setting
from asyncrl.sim.world import Actor, Args, World
from asyncrl.versions import is_over_age, lag

NAME = "learner.0"
RESERVE_WAIT_S = 0.5
UNPUBLISHED_WAIT_S = 0.01
PAUSE_S = 0.5
START_DIGEST = 0


@dataclass
class StepRecord:
    """One trained step.

    Attributes:
        ended: Virtual time. step_s: Since the end of the step before; wait_s of it for a batch.
        num_tokens: Prompts included. lags: Trained tokens by lag; num_masked were over the bound.
        sampled_lags: Of all tokens of the batch, before any is masked.
    """

    step: int
    ended: float
    step_s: float
    wait_s: float
    num_tokens: int
    lags: Counter[int] = field(default_factory=Counter)
    sampled_lags: Counter[int] = field(default_factory=Counter)
    num_masked: int = 0
    num_stale_groups: int = 0


class LearnerActor(Actor):
    """See the module.

    Attributes:
        state: For the supervisor. records: Of all steps that this process has trained.
        is_busy: It computes. digests: Of the weights, by step.
    """

    def __init__(self, world: World, setting: Setting, rates: Rates, num_steps: int) -> None:
        super().__init__(world, NAME)
        self._setting, self._rates, self._num_steps = setting, rates, num_steps
        self._checkpoints: dict[int, int] = world.disk.setdefault(NAME, {0: START_DIGEST})
        self.state = "starting"
        self.step = 0
        self.records: list[StepRecord] = []
        self.is_busy = False
        self.digest = START_DIGEST
        self._token = 0
        self._published_step = -1
        self._committed: list[int] = []
        self._wait_began: float | None = None
        self._wait_s = 0.0
        self._step_began = world.now

    def begin(self) -> None:
        self._ask("open", {}, self._restore)

    def _restore(self, answer: Args) -> None:
        self._token = answer["token"]
        self._committed = sorted(step for _, step in answer["checkpoints"] if step in self._checkpoints)
        step = self._committed[-1] if self._committed else 0
        if answer["steps_trained"] or step:
            self._ask("resume", {"token": self._token, "step": step}, lambda _: self._stand_at(step))
        else:
            self._stand_at(step)

    def _stand_at(self, step: int) -> None:
        self.step, self.digest = step, self._checkpoints[step]
        self.state = "training"
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
        if answer is not None and answer["is_taken"]:
            self._published_step = self.step
        self._next()

    # Train

    def _next(self) -> None:
        if self.step >= self._num_steps:
            self.state = "ended"
            self.world.note("ended", step=self.step)
            return
        if self._wait_began is None:
            self._wait_began = self.world.now
        is_published = self._published_step == self.step
        wait_s = RESERVE_WAIT_S if is_published else UNPUBLISHED_WAIT_S
        if is_published and self._setting.pace.lease_wait_s == NEVER:
            wait_s = NEVER
        args = {"token": self._token, "step": self.step, "wait_s": wait_s}
        self._ask("reserve", args, self._hear_batch)

    def _hear_batch(self, answer: Args) -> None:
        groups = answer["groups"]
        if not groups:
            self._publish()
            return
        if self._wait_began is not None:
            self._wait_s += self.world.now - self._wait_began
            self._wait_began = None
        num_tokens = sum(group[1] for group in groups)
        self.is_busy = True
        self.after(self._rates.learner_s(num_tokens), self._trained, groups, answer["steps"], num_tokens)

    def _trained(self, groups: list[Any], steps: dict[int, int], num_tokens: int) -> None:
        self.is_busy = False
        record = StepRecord(self.step, 0.0, 0.0, 0.0, num_tokens)
        dropped = []
        for ticket, _, spans in groups:
            num_left = self._count(record, spans, steps)
            if not num_left:
                dropped.append((ticket, "stale"))
        record.num_stale_groups = len(dropped)
        self.digest = zlib.crc32(repr([group[0] for group in groups]).encode(), self.digest)
        args = {
            "token": self._token,
            "step": self.step,
            "dropped": dropped,
            "lag_max": max(record.lags, default=-1),
        }
        self._ask("trained", args, lambda _: self._book(record))

    def _count(self, record: StepRecord, spans: Counter[int], steps: dict[int, int]) -> int:
        """Sort a group's tokens by lag; return how many of them train."""
        num_left, max_lag = 0, self._setting.ledger.max_lag
        for number, num_tokens in spans.items():
            sampled = steps[number]
            record.sampled_lags[lag(self.step, sampled)] += num_tokens
            if is_over_age(self.step, sampled, max_lag):
                record.num_masked += num_tokens
            else:
                record.lags[lag(self.step, sampled)] += num_tokens
                num_left += num_tokens
        return num_left

    def _book(self, record: StepRecord) -> None:
        now = self.world.now
        record.ended, record.step_s = now, now - self._step_began
        record.wait_s, self._wait_s = self._wait_s, 0.0
        self._step_began = now
        self.records.append(record)
        self.world.note("step", record=record, digest=self.digest, token=self._token)
        self.step += 1
        if self.step % self._setting.checkpoint_every == 0:
            self._checkpoint()
        else:
            self._publish()

    def _checkpoint(self) -> None:
        step = self.step
        self._checkpoints[step] = self.digest
        kept = [*(one for one in self._committed if one < step), step][-self._setting.checkpoints_kept :]
        args = {"token": self._token, "step": step, "digest": str(self.digest), "kept": kept}

        def hear(_: Args) -> None:
            self._committed = kept
            self._publish()

        self._ask("checkpointed", args, hear)

    def _fall(self, reason: str) -> None:
        """End: somebody else is the learner."""
        self.state = "fenced"
        self.world.note("fenced", name=self.name, life=self.life, reason=reason)
        self.world.kill(self.name)

    def _ask(self, op: str, args: Args, then: Callable[[Args], None]) -> None:
        """Ask the buffer until it answers."""

        def hear(answer: Args | None) -> None:
            if answer is None:
                self.after(PAUSE_S, self._ask, op, args, then)
            elif answer.get("is_fenced"):
                self._fall(answer["error"])
            else:
                assert "error" not in answer, answer["error"]
                then(answer)

        wait_s = args.get("wait_s", 0.0)
        self.call(buffer.NAME, op, args, hear, wait_s + self._setting.pace.call_deadline_s)
