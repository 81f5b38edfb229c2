"""A rollout replica: leases groups, lets its engine sample them, pushes them, swaps weights under way.

    STARTING -> SYNCING -> READY     READY <-> PINNED (evaluation)
  consumes: grants, versions     waits for: a free place, the buffer     produces: pushes, reports of swaps
Owns the timing of its engine. When it asks for leases and renews them are the rules of
`asyncrl.buffer.rules.replica`, which `rollout_service.replica` follows.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from asyncrl.buffer.ledger.tickets import Grant, Part
from asyncrl.buffer.rules.replica import (
    HeldOrder,
    LeaseCall,
    Leasing,
    count_free_groups,
    is_order_good,
    may_lease,
    renewal_interval_s,
)
from asyncrl.core.staleness import UNLOADED
from asyncrl.core.states import ServiceState
from asyncrl.planner.actors import buffer
from asyncrl.planner.actors.engine import SimulatedEngine
from asyncrl.planner.actors.evaluation import PinnedWork, draw_answers
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import LEASE_WAIT_S, Setting
from asyncrl.planner.world import Actor, Args, World

STARTING, SYNCING = ServiceState.STARTING, ServiceState.SYNCING
READY, PINNED = ServiceState.READY, ServiceState.PINNED


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
        self.started_at = world.now
        self.state = STARTING
        self.serving = UNLOADED
        self.is_standby = is_standby
        self._is_fenced = False
        self._work: dict[tuple[int, int], Work] = {}
        self._num_unfinished = 0
        self._leasing, self._order = Leasing(), HeldOrder()
        self._ordered: tuple[Part, LeaseCall] | None = None
        self._due: float | None = None
        self._swapping = UNLOADED
        self._evaluation: PinnedWork | None = None
        self._put_off: tuple[str, int] | None = None
        self.num_evaluated = self.num_done = 0
        self._dice = random.Random(0)

    def begin(self) -> None:
        """Ask for weights once the engine is up."""
        self.after(self._rates.start_s, self._come_up)
        self.every(renewal_interval_s(self._setting.ledger.lease_s), self._renew)

    def _come_up(self) -> None:
        self.state = SYNCING
        self._attend()

    def _attend(self) -> None:
        self.tell(self._receiver, "attend", number=self.serving)

    # Weights

    def on_withdrawn(self, src: str, args: Args, call: int) -> None:
        if self.state != STARTING:
            self._attend()

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
        self.world.note("serving", name=self.name, number=number)
        if self.state == SYNCING:
            self.state = READY
        self.tell(receiver, "swapped", number=number)
        self._schedule()
        if self._ordered is not None and self.state == READY:
            self._pin(*self._ordered)
        self._ask()

    # Leases

    @property
    def num_free(self) -> int:
        """Groups that it could work on beside those that it has."""
        setting = self._setting
        return count_free_groups(
            setting.max_groups * setting.num_samples, setting.num_samples, self._num_unfinished
        )

    def _ask(self) -> None:
        """Make the lease call that is due, if one is."""
        if not may_lease(self.state, is_fenced=self._is_fenced, is_standby=self.is_standby):
            return
        call = self._leasing.next_call(self.serving, self.num_free, self._work)
        if call is None:
            return
        args: dict[str, float | None] = {"version": call.version, "want": call.want, "wait_s": LEASE_WAIT_S}
        args["evaluating"] = self._order.number
        self.call(buffer.NAME, "lease", args, lambda answer: self._hear_grants(call, answer))

    def _hear_grants(self, call: LeaseCall, answer: Args) -> None:
        for grant in answer["grants"]:
            self._begin_group(grant)
        part = answer["evaluate"]
        if part is not None and self._order.take(part.id):
            self._ordered = (part, call)
            if self._swapping <= self.serving:  # else it pins itself once the swap is done
                self._pin(part, call)
        else:
            self._end_lease(call)

    def _end_lease(self, call: LeaseCall) -> None:
        self._leasing.end(call, is_answered=True)
        self._ask()

    def _begin_group(self, grant: Grant) -> None:
        key = (grant.ticket, grant.attempt)
        lengths = self._setting.draw_lengths(grant.ticket, self._dice)
        self._work[key] = Work(grant, len(lengths))
        self._num_unfinished += len(lengths)
        stall_s = self._rates.prefill_s_per_token * self._setting.prompt_tokens
        for sample, num_tokens in enumerate(lengths):
            self.engine.begin((key, sample), num_tokens, self.world.now, stall_s)
        self._schedule()

    def _renew(self) -> None:
        if self.state != STARTING:
            self.tell(buffer.NAME, "renew", held=list(self._work))

    # Evaluations

    def _pin(self, part: Part, call: LeaseCall) -> None:
        """Serve one version until no part of its evaluation is left for this replica."""
        self.state = PINNED
        if self._setting.cohort == 1:
            self.tell(self._receiver, "pin")
        if is_order_good(call.version, self.serving):
            self._hear_part({"evaluate": part})
            return
        self._order.forget()
        args = {"version": self.serving, "want": 0, "wait_s": 0.0, "evaluating": None}
        self.call(buffer.NAME, "lease", args, self._hear_part)

    def _hear_part(self, answer: Args) -> None:
        part = answer["evaluate"]
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
            self.call(buffer.NAME, "evaluated", args, self._hear_part)
        self._schedule()

    def _end_answer(self, work: PinnedWork, num_tokens: int) -> None:
        self.num_evaluated += num_tokens
        work.end_one()
        self._answer_more(work)

    def _unpin(self) -> None:
        self.state, ordered, self._ordered = READY, self._ordered, None
        self._order.forget()
        if self._setting.cohort == 1:
            self.tell(self._receiver, "unpin")
        put_off, self._put_off = self._put_off, None
        if put_off is not None:
            self.on_swap(put_off[0], {"number": put_off[1]}, 0)
        if ordered is not None:
            self._end_lease(ordered[1])

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
            else:
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
        work = self._work[key]
        num_tokens = work.spans.total() + round(self._setting.prompt_tokens * self._setting.trained_samples)
        args = {"ticket": key[0], "attempt": key[1], "num_tokens": num_tokens, "spans": work.spans}
        self.call(buffer.NAME, "push", args, lambda _: self._end_group(key))

    def _end_group(self, key: tuple[int, int]) -> None:
        del self._work[key]
        self._ask()
