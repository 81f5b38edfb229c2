"""The buffer: the real ledger and order of waiting behind one thread, all in memory.

consumes: requests of replicas and of the learner     waits for: what a parked request needs
unblocked by: any change of the ledger, time          produces: grants, batches
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.pending_requests import QUIET_OPS, Owner, PendingRequest, PendingRequests, lease_lane
from asyncrl.planner.actors.evaluation import TALLIES
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import TICK_S, Setting
from asyncrl.planner.world import Actor, Args, Message, World

NAME = "buffer.0"
LEARNER: Owner = ("learner", "")
BYTES_PER_TOKEN = 9
BYTES_PER_TRAJECTORY = 64
Spans = Counter[int]
"""Tokens by the version number that sampled them."""


class Asked(NamedTuple):
    """A call that waits for its answer."""

    src: str
    call: int


Waiting = PendingRequest[Asked, Args]


class BufferActor(Actor):
    """See the module.

    Attributes:
        busy_s: Of the one thread. num_ops: Requests that it has served.
    """

    def __init__(self, world: World, setting: Setting, rates: Rates) -> None:
        super().__init__(world, NAME)
        self._setting, self._rates = setting, rates
        self.ledger = Ledger(setting.ledger)
        self._payloads: dict[int, tuple[int, Spans]] = {}
        self._parked: PendingRequests[Asked, Args] = PendingRequests()
        self._has_changed = False
        self._free_at = world.now
        self.busy_s = 0.0
        self.num_ops = 0

    def begin(self) -> None:
        self.ledger.describe_data(self._setting.num_prompts, "simulated")
        if self._setting.tightened_to is not None:
            self.ledger.tighten(self._setting.tightened_to)
        self._settle()
        self.every(TICK_S, self.tick)

    def receive(self, src: str, message: Message) -> None:
        self.num_ops += 1
        self.busy_s += self._rates.buffer_op_s
        self._free_at = max(self._free_at, self.world.now) + self._rates.buffer_op_s
        self._has_changed |= message.op not in QUIET_OPS
        super().receive(src, message)
        self._settle()

    # Replicas

    def on_lease(self, src: str, args: Args, call: int) -> None:
        lane, owner, wait_s = lease_lane(args["version"], args["want"]), ("replica", src), args["wait_s"]
        if wait_s:  # in production a call under an older version soon ends
            for parked in self._parked.of(owner):
                self._parked.remove(parked)
                self._end(parked)
        nothing: dict[str, Any] = {"grants": [], "evaluate": None}
        self._park(Asked(src, call), lambda: self._grant(src, args), nothing, wait_s, owner, lane)

    def on_renew(self, src: str, args: Args, call: int) -> None:
        self.ledger.renew(src, args["held"], self.world.now)

    def on_push(self, src: str, args: Args, call: int) -> None:
        ticket, attempt, num_tokens, setting = (
            args["ticket"],
            args["attempt"],
            args["num_tokens"],
            self._setting,
        )
        spans: Spans = args["spans"]
        result = self.ledger.judge_push(src, ticket, attempt)
        if result == "accepted":
            num_bytes = num_tokens * BYTES_PER_TOKEN + BYTES_PER_TRAJECTORY * setting.trained_samples
            num_bytes = min(num_bytes, setting.ledger.max_group_bytes)
            has_zero_variance = (
                bool(setting.zero_variance_share) and self.world.random.random() < setting.zero_variance_share
            )
            result = self.ledger.take_in(
                ticket, num_tokens, num_bytes, spans, has_zero_variance=has_zero_variance
            )
            if result == "stored":
                self._payloads[ticket] = (num_tokens, spans)
        self._reply(src, call, result=result)

    def on_evaluated(self, src: str, args: Args, call: int) -> None:
        orders, number, version = self.ledger.evaluations, args["id"], args["version"]
        if orders.finish(number, version, TALLIES, args["part"]):
            evaluation = self.ledger.state.evaluations[number]
            if evaluation.is_done:
                self.world.note("evaluated", id=number, step=evaluation.step)
        self._reply(src, call, evaluate=orders.give_more(number, src, version))

    # The learner

    def on_open(self, src: str, args: Args, call: int) -> None:
        self._reply(src, call, token=self.ledger.open(src))

    def on_register_version(self, src: str, args: Args, call: int) -> None:
        self._reply(src, call, number=self.ledger.register_version(args["token"], args["step"]))

    def on_reserve(self, src: str, args: Args, call: int) -> None:
        self._park(Asked(src, call), lambda: self._reserve(args), {"groups": []}, args["wait_s"], LEARNER)

    def on_trained(self, src: str, args: Args, call: int) -> None:
        self.ledger.trained(args["token"], args["step"], args["dropped"], args["lag_max"])
        self._reply(src, call)

    def on_checkpointed(self, src: str, args: Args, call: int) -> None:
        self.ledger.checkpointed(args["token"], args["step"], "simulated", args["kept"])
        self.world.note("checkpointed", step=args["step"])
        self._reply(src, call)

    def on_request_evaluation(self, src: str, args: Args, call: int) -> None:
        number = self.ledger.request_evaluation(args["token"], args["step"])
        self.world.note("evaluation", id=number, step=args["step"])
        self._reply(src, call)

    # Time, and what waits

    def tick(self) -> None:
        """Let time pass at the ledger: leases expire, waits end."""
        self.ledger.expire(self.world.now)
        self._has_changed = True
        self._settle()

    def _park(
        self,
        asked: Asked,
        attempt: Callable[[], Args | None],
        nothing: Args,
        wait_s: float,
        owner: Owner,
        lane: Hashable = None,
    ) -> None:
        """Answer now if possible, else when the ledger allows it, else after `wait_s`."""
        found = attempt()
        if found is None and wait_s == 0.0:
            found = nothing
        if found is not None:
            self._reply(*asked, **found)
            return
        until = self.world.now + wait_s
        self._parked.add(
            PendingRequest(asked, attempt, lambda: nothing, until, math.inf, owner, lane or owner)
        )

    def _end(self, parked: Waiting) -> None:
        self._reply(*parked.request, **parked.last())

    def _settle(self) -> None:
        """Serve whom the change has unblocked, then let go of payloads that are not needed any more."""
        has_changed, self._has_changed = self._has_changed or self.ledger.has_news, False
        self._parked.end_turn(
            self.world.now,
            self._answers,
            self._end,
            has_changed=has_changed,
            are_alike=lambda: not self.ledger.evaluations.have_free_part,
        )
        self._let_go()

    def _answers(self, parked: Waiting) -> bool:
        found = parked.attempt()
        if parked.owner == LEARNER:  # a reservation drops and issues again what others may lease
            self._has_changed |= self.ledger.has_news
        if found is not None:
            self._reply(*parked.request, **found)
        return found is not None

    def _grant(self, src: str, args: Args) -> Args | None:
        found = self.ledger.grant(src, args["version"], args["want"], args["evaluating"], self.world.now)
        return None if found is None else {"grants": found[0], "evaluate": found[1]}

    def _reserve(self, args: Args) -> Args | None:
        found = self.ledger.reserve_next(
            args["token"], args["step"], self.world.now, args["have"], args["at_least"]
        )
        if found is None:
            return None
        groups = [(one.id, *self._payloads[one.id]) for one in found.tickets]
        return {"groups": groups, "steps": dict(found.versions), "is_whole": found.is_whole}

    def _let_go(self) -> None:
        self.ledger.drain_events()
        state = self.ledger.state
        for ticket in state.released:
            self._payloads.pop(ticket, None)
        state.freed.clear()
        state.released.clear()

    def _reply(self, dst: str, call: int, **args: Any) -> None:
        """Answer when the thread has come to it."""
        if not call:
            return
        delay_s = self._free_at - self.world.now
        if delay_s > 0:
            self.after(delay_s, self._answer_late, dst, call, args)
        else:
            self.answer(dst, call, **args)

    def _answer_late(self, dst: str, call: int, args: Args) -> None:
        self.answer(dst, call, **args)
