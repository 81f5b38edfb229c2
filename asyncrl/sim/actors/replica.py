"""A rollout replica: leases groups, lets its engine sample them, pushes them, swaps weights under way.

    STARTING -> SYNCING -> READY -> DRAINING     READY <-> PINNED (evaluation)
  consumes: grants, versions     waits for: a free place, the buffer     produces: pushes, reports of swaps
What it asks is asked again until it is answered; the ledger is idempotent by (ticket, attempt).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from asyncrl.buffer.ledger.tickets import Grant
from asyncrl.sim.actors import buffer
from asyncrl.sim.actors.evaluation import PinnedWork, draw_answers
from asyncrl.sim.engine import SimulatedEngine
from asyncrl.sim.rates import Rates
from asyncrl.sim.setting import NEVER, Setting
from asyncrl.sim.world import Actor, Args, World
from asyncrl.versions import UNLOADED

STARTING, SYNCING, READY, PINNED, DRAINING = "STARTING", "SYNCING", "READY", "PINNED", "DRAINING"
ENDED = "ENDED"
PAUSE_S = 0.5


@dataclass
class Work:
    """A group that is sampled here."""

    grant: Grant
    num_left: int
    num_tokens: float = 0.0
    spans: Counter[int] = field(default_factory=Counter)


class ReplicaActor(Actor):
    """See the module.

    Attributes:
        state: For the supervisor.
        serving: The version number of its engine.
        num_evaluated: Tokens that it has sampled for evaluations.
    """

    def __init__(
        self,
        world: World,
        name: str,
        receiver: str,
        setting: Setting,
        rates: Rates,
        *,
        is_standby: bool = False,
    ) -> None:
        super().__init__(world, name)
        self._setting, self._rates = setting, rates
        self._receiver = receiver
        self.engine = SimulatedEngine(rates.token_rate, setting.max_sequences)
        self.engine.pass_time(world.now)
        self.born = world.now
        self.state = STARTING
        self.serving = UNLOADED
        self.is_standby = is_standby
        self._is_fenced = False
        self._work: dict[tuple[int, int], Work] = {}
        self._num_unfinished = 0
        self._asking = 0
        self._asked_version = UNLOADED
        self._may_miss_grants = False
        self._due: float | None = None
        self._swapping = UNLOADED
        self._evaluation: PinnedWork | None = None
        self._has_order = False
        self._put_off: tuple[str, int] | None = None
        self.num_evaluated = self.num_done = 0
        self._dice = random.Random(0)

    def begin(self) -> None:
        """Say that the leases of an earlier life are free, and ask for weights once the engine is up."""
        self.after(self._rates.start_s, self._come_up)
        self.every(self._setting.ledger.lease_s / 3, self._renew)

    def _come_up(self) -> None:
        self._insist(buffer.NAME, "retire", {}, lambda _: self._sync())

    def _sync(self) -> None:
        self.state = SYNCING
        self.tell(self._receiver, "attend", number=self.serving)

    # Weights

    def on_who_serves(self, src: str, args: Args, call: int) -> None:
        if self.state not in (STARTING, DRAINING, ENDED):
            self.tell(src, "attend", number=self.serving)

    def on_fence(self, src: str, args: Args, call: int) -> None:
        self._is_fenced = args["is_fenced"]
        self._ask()

    def on_swap(self, src: str, args: Args, call: int) -> None:
        number = args["number"]
        if self.state == PINNED:
            self._put_off_swap(src, number)
            return
        if number <= self.serving or number <= self._swapping:
            if number <= self.serving:
                self.tell(src, "swapped", number=number)
            return
        self._swapping = number
        self.engine.swap(self._rates.swap_s, self.world.now)
        self.after(self._rates.swap_s, self._end_swap, src, number)

    def _end_swap(self, receiver: str, number: int) -> None:
        self.engine.serve(number, self.world.now)
        self.serving = number
        self.world.note("serving", name=self.name, life=self.life, number=number)
        if self.state == SYNCING:
            self.state = READY
        self.tell(receiver, "swapped", number=number)
        self._schedule()
        if self._has_order and self.state == READY:
            self._pin()
        self._ask()

    # Leases

    @property
    def _num_wanted(self) -> int:
        per_group = self._setting.num_samples
        return max(0, self._setting.max_groups * per_group - self._num_unfinished) // per_group

    def _ask(self) -> None:
        """Ask for groups, unless the same was asked already and is not answered yet."""
        if self.state != READY or self._is_fenced or self.is_standby:
            return
        want = self._num_wanted
        if want <= 0 or (self._asking and self._asked_version == self.serving):
            return
        self._asking, self._asked_version = self._asking + 1, self.serving
        args: dict[str, Any] = {"version": self.serving, "want": want}
        if self._may_miss_grants and self._asking == 1:
            args["held"] = list(self._work)
            self._may_miss_grants = False
        pace = self._setting.pace
        deadline_s = NEVER if pace.lease_wait_s == NEVER else pace.lease_wait_s + pace.call_deadline_s
        self.call(buffer.NAME, "lease", args, self._hear_grants, deadline_s)

    def _hear_grants(self, answer: Args | None) -> None:
        self._asking -= 1
        if answer is None or "error" in answer:
            self._may_miss_grants = True
            self.after(PAUSE_S, self._ask)
            return
        for grant in answer["grants"]:
            self._begin_group(grant)
        if answer.get("evaluate") is not None and self.state == READY and not self._has_order:
            self._has_order = True
            if self._swapping <= self.serving:  # else it pins itself once the swap is done
                self._pin()
        self._ask()

    def _begin_group(self, grant: Grant) -> None:
        key = (grant.ticket, grant.attempt)
        if key in self._work:
            return
        lengths = self._setting.draw_lengths(grant.ticket, self._dice)
        self._work[key] = Work(grant, len(lengths))
        self._num_unfinished += len(lengths)
        stall_s = self._rates.prefill_s_per_token * self._setting.prompt_tokens
        for sample, num_tokens in enumerate(lengths):
            self.engine.begin((key, sample), num_tokens, self.world.now, stall_s)
        self._schedule()

    def _renew(self) -> None:
        if not self._work:
            return
        held = list(self._work)
        deadline_s = self._setting.pace.call_deadline_s
        self.call(buffer.NAME, "renew", {"held": held}, self._hear_lost, deadline_s)

    def _hear_lost(self, answer: Args | None) -> None:
        if answer is not None and answer.get("lost"):
            for key in answer["lost"]:
                self._lose(tuple(key))
            self._ask()

    def _lose(self, key: Any) -> None:
        work = self._work.pop(key, None)
        if work is None:
            return
        self._num_unfinished -= work.num_left
        self.engine.lose({(key, sample) for sample in range(self._setting.num_samples)}, self.world.now)
        self._schedule()

    # Evaluations

    def _pin(self) -> None:
        """Serve one version until no part of its evaluation is left for this replica."""
        self.state = PINNED
        if self._setting.cohort == 1:
            self.tell(self._receiver, "pin")
        # Asked for again: while the order came the replica may have swapped, and then it holds no more.
        args = {"version": self.serving, "want": 0}
        self._insist(buffer.NAME, "lease", args, self._hear_part)

    def _hear_part(self, answer: Args) -> None:
        part = answer.get("evaluate")
        if self.state != PINNED:
            return
        if part is None:
            self._unpin()
            return
        lengths = draw_answers(self._setting, part, self._dice)
        self._evaluation = PinnedWork(part, self.serving, lengths, self._setting.eval_at_once)
        self._answer_more(self._evaluation)

    def _answer_more(self, work: PinnedWork) -> None:
        """Begin what there is a place for; report the part if nothing of it is left."""
        stall_s = self._rates.prefill_s_per_token * self._setting.prompt_tokens
        for sample, num_tokens in work.take_next():
            self.engine.begin((work.key, sample), num_tokens, self.world.now, stall_s)
        if work.is_done:
            self._evaluation = None
            args = {"id": work.part.id, "part": work.part.part, "version": work.version}
            self._insist(buffer.NAME, "evaluated", args, self._hear_part)
        self._schedule()

    def _end_answer(self, work: PinnedWork, num_tokens: int) -> None:
        self.num_evaluated += num_tokens
        work.end_one()
        self._answer_more(work)

    def _unpin(self) -> None:
        self.state, self._has_order = READY, False
        if self._setting.cohort == 1:
            self.tell(self._receiver, "unpin")
        put_off, self._put_off = self._put_off, None
        if put_off is not None:
            self.on_swap(put_off[0], {"number": put_off[1]}, 0)
        self._ask()

    def _put_off_swap(self, receiver: str, number: int) -> None:
        """Swap once the pin has ended.

        A receiver of its own hears of the pin and hands over anew then; a shared one goes on with the others.
        """
        if self._setting.cohort > 1:
            self._put_off = (receiver, number)
            self.tell(receiver, "swapped", number=number)

    # Sampling

    def _schedule(self) -> None:
        """Be there when the next request ends."""
        end = self.engine.next_end()
        if end is None or (self._due is not None and self._due <= end):
            return
        self._due = end
        self.world.at(end, self._do, self._collect, (end,))

    def _collect(self, due: float) -> None:
        if self._due != due:
            return  # an earlier one was asked for since
        self._due = None
        for (key, sample), spans in self.engine.take_ended(self.world.now):
            if self._evaluation is not None and key == self._evaluation.key:
                self._end_answer(self._evaluation, spans.total())
            elif key in self._work:  # else of an evaluation that a drain has ended
                self._end_sample(key, sample, spans)
        self._schedule()
        self._ask()

    def _end_sample(self, key: tuple[int, int], sample: int, spans: Counter[int]) -> None:
        work = self._work[key]
        work.num_left -= 1
        self.num_done += 1
        self._num_unfinished -= 1
        if sample < self._setting.trained_samples:
            work.spans.update(spans)
        if work.num_left == 0:
            self.after(self._rates.group_overhead_s, self._push, key)

    def _push(self, key: tuple[int, int]) -> None:
        work = self._work.get(key)
        if work is None:
            return
        num_tokens = work.spans.total() + round(self._setting.prompt_tokens * self._setting.trained_samples)
        args = {"ticket": key[0], "attempt": key[1], "num_tokens": num_tokens, "spans": work.spans}
        self._insist(buffer.NAME, "push", args, lambda _: self._end_group(key))

    def _end_group(self, key: tuple[int, int]) -> None:
        self._work.pop(key, None)
        self._ask()
        if self.state == DRAINING and not self._work:
            self.state = ENDED

    # The supervisor

    def drain(self) -> None:
        """Hand back what is unfinished, and end."""
        self.state = DRAINING
        self._evaluation = None  # the supervisor's `retire` frees the part
        held = list(self._work)
        for key in held:
            self._lose(key)
        self._insist(buffer.NAME, "release", {"held": held}, lambda _: self._end())

    def _end(self) -> None:
        self.state = ENDED

    def promote(self) -> None:
        """Take leases from here on."""
        self.is_standby = False
        self._ask()

    def _insist(self, dst: str, op: str, args: Args, then: Any) -> None:
        """Ask until there is an answer."""

        def hear(answer: Args | None) -> None:
            if answer is None:
                self.after(PAUSE_S, self._insist, dst, op, args, then)
            else:
                then(answer)

        self.call(dst, op, args, hear, self._setting.pace.call_deadline_s)
