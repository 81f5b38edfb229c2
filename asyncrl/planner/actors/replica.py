"""A rollout replica: leases groups, lets its engine sample them, pushes them, swaps weights under way.

    STARTING -> SYNCING -> READY -> DRAINING     READY <-> PINNED (evaluation)
  consumes: grants, versions     waits for: a free place, the buffer     produces: pushes, reports of swaps
Owns the timing of its engine. When it asks for leases, renews, repeats a call and gives back are the rules of
`asyncrl.buffer.rules.replica`, which `rollout_service.replica` follows.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.buffer.ledger.tickets import Grant, Part
from asyncrl.buffer.rules.replica import (
    FAREWELL_DEADLINE_S,
    RETRY_PAUSE_S,
    HeldOrder,
    LeaseCall,
    Leasing,
    Tries,
    count_free_groups,
    is_order_good,
    may_lease,
    plan_drain,
    renewal_interval_s,
)
from asyncrl.core.staleness import UNLOADED
from asyncrl.core.states import ServiceState
from asyncrl.planner.actors import buffer
from asyncrl.planner.actors.evaluation import PinnedWork, draw_answers
from asyncrl.planner.engine import SimulatedEngine
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
from asyncrl.planner.world import Actor, Args, World

STARTING, SYNCING, READY = ServiceState.STARTING, ServiceState.SYNCING, ServiceState.READY
PINNED, DRAINING, ENDED = ServiceState.PINNED, ServiceState.DRAINING, ServiceState.ENDED


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
        self._leasing, self._order = Leasing(), HeldOrder()
        self._ordered: tuple[Part, LeaseCall] | None = None
        self._drain_stages: deque[float] = deque()
        self._is_leaving = False
        self._due: float | None = None
        self._swapping = UNLOADED
        self._evaluation: PinnedWork | None = None
        self._put_off: tuple[str, int] | None = None
        self.num_evaluated = self.num_done = 0
        self._dice = random.Random(0)

    def begin(self) -> None:
        """Say that the leases of an earlier life are free, and ask for weights once the engine is up."""
        self.after(self._rates.start_s, self._come_up)
        self.every(renewal_interval_s(self._setting.ledger.lease_s), self._renew)

    def _come_up(self) -> None:
        self._insist(buffer.NAME, "retire", {}, lambda _: self._sync())

    def _sync(self) -> None:
        self.state = SYNCING
        self.tell(self._receiver, "attend", number=self.serving, life=str(self.life))

    # Weights

    def on_who_serves(self, src: str, args: Args, call: int) -> None:
        if self.state not in (STARTING, DRAINING, ENDED):
            self.tell(src, "attend", number=self.serving, life=str(self.life))

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
        if self._ordered is not None and self.state == READY:
            self._pin(*self._ordered)
        self._ask()

    # Leases

    def _ask(self) -> None:
        """Make the lease call that is due, if one is."""
        if not may_lease(self.state, is_fenced=self._is_fenced, is_standby=self.is_standby):
            return
        setting = self._setting
        want = count_free_groups(setting.max_groups, setting.num_samples, self._num_unfinished)
        call = self._leasing.next_call(self.serving, want, self._work)
        if call is None:
            return
        wait_s = max(call.wait_s, setting.pace.lease_wait_s)
        args = {"version": call.version, "want": call.want, "held": call.held, "wait_s": wait_s}
        args["evaluating"] = self._order.number
        deadline_s = wait_s + setting.pace.call_deadline_s
        self.call(buffer.NAME, "lease", args, lambda answer: self._hear_grants(call, answer), deadline_s)

    def _hear_grants(self, call: LeaseCall, answer: Args | None) -> None:
        if answer is None or "error" in answer:
            self.after(RETRY_PAUSE_S, self._end_lease, call, False)
            return
        for grant in answer["grants"]:
            self._begin_group(grant)
        part = answer.get("evaluate")
        if part is not None and self._order.take(part.id):
            self._ordered = (part, call)
            if self._swapping <= self.serving:  # else it pins itself once the swap is done
                self._pin(part, call)
        else:
            self._end_lease(call, True)

    def _end_lease(self, call: LeaseCall, is_answered: bool) -> None:
        self._leasing.end(call, is_answered=is_answered)
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
        if self.state not in (STARTING, ENDED):
            args, deadline_s = {"held": list(self._work)}, self._setting.pace.call_deadline_s
            self.call(buffer.NAME, "renew", args, self._hear_lost, deadline_s)

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

    def _pin(self, part: Part, call: LeaseCall) -> None:
        """Serve one version until no part of its evaluation is left for this replica."""
        self.state = PINNED
        if self._setting.cohort == 1:
            self.tell(self._receiver, "pin", life=str(self.life))
        if is_order_good(call.version, self.serving):
            self._hear_part({"evaluate": part})
            return
        self._order.forget()
        args = {"version": self.serving, "want": 0, "held": None, "wait_s": 0.0, "evaluating": None}
        self._insist(buffer.NAME, "lease", args, self._hear_part, self._unpin)

    def _hear_part(self, answer: Args) -> None:
        part = answer.get("evaluate")
        if self.state != PINNED:
            return
        if part is None:
            self._unpin()
            return
        self._order.take(part.id)
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
            self._insist(buffer.NAME, "evaluated", args, self._hear_part, self._unpin)
        self._schedule()

    def _end_answer(self, work: PinnedWork, num_tokens: int) -> None:
        self.num_evaluated += num_tokens
        work.end_one()
        self._answer_more(work)

    def _unpin(self) -> None:
        self.state, ordered, self._ordered = READY, self._ordered, None
        self._order.forget()
        if self._setting.cohort == 1:
            self.tell(self._receiver, "unpin", life=str(self.life))
        put_off, self._put_off = self._put_off, None
        if put_off is not None:
            self.on_swap(put_off[0], {"number": put_off[1]}, 0)
        if ordered is not None:
            self._end_lease(ordered[1], True)

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
        self._insist(buffer.NAME, "push", args, lambda _: self._end_group(key), lambda: self._end_group(key))

    def _end_group(self, key: tuple[int, int]) -> None:
        self._work.pop(key, None)
        self._ask()
        if self.state == DRAINING and not self._work:
            self._give_back()

    # The supervisor

    def drain(self, grace_s: float = 0.0) -> None:
        """Let groups end within `grace_s`, hand back what is unfinished, and end."""
        self.state = DRAINING
        self._evaluation = None  # the supervisor's `retire` frees the part
        for _, most_s in plan_drain(grace_s, resumes_partial=False):
            self._drain_stages.append(most_s)
        self._end_stage()

    def _end_stage(self) -> None:
        if self._drain_stages and self._work:
            self.after(self._drain_stages.popleft(), self._end_stage)
        else:
            self._give_back()

    def _give_back(self) -> None:
        if self._is_leaving:
            return
        self._is_leaving, held = True, list(self._work)
        for key in held:
            self._lose(key)
        self.call(buffer.NAME, "release", {"held": held}, lambda _: self._retire(), FAREWELL_DEADLINE_S)

    def _retire(self) -> None:
        self.call(buffer.NAME, "retire", {}, lambda _: self._end(), FAREWELL_DEADLINE_S)

    def _end(self) -> None:
        self.state = ENDED

    def promote(self) -> None:
        """Take leases from here on."""
        self.is_standby = False
        self._ask()

    def _insist(
        self,
        dst: str,
        op: str,
        args: Args,
        then: Callable[[Args], None],
        give_up: Callable[[], None] | None = None,
    ) -> None:
        """Ask until there is an answer, or with `give_up` until the tries are spent."""
        tries = Tries()

        def ask() -> None:
            self.call(dst, op, args, hear, self._setting.pace.call_deadline_s)

        def hear(answer: Args | None) -> None:
            if answer is not None:
                then(answer)
            elif give_up is None or tries.may_repeat():
                self.after(RETRY_PAUSE_S, ask)
            else:
                give_up()

        ask()
