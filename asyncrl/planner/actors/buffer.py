"""The buffer: the real ledger and order of waiting behind one thread, its journal on the disk of the world.

  consumes: requests of replicas and of the learner     waits for: what a parked request needs
  unblocked by: any change of the ledger, time          produces: grants, batches
Invariant: nobody is answered before the journal has the events.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import Ticket
from asyncrl.buffer.parking import QUIET_OPS, Owner, Parked, ParkingLot
from asyncrl.buffer.rules.replica import LEASE_WAIT_S
from asyncrl.core.errors import AsyncrlError, FencedError
from asyncrl.planner.actors.evaluation import TALLIES
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
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


Waiting = Parked[Asked, Args]


class Kept:
    """What outlives the process: events and payloads."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.payloads: dict[int, tuple[int, Spans]] = {}


class BufferActor(Actor):
    """See the module.

    Attributes:
        busy_s: Of the one thread. num_ops: Requests that it has served.
    """

    def __init__(self, world: World, setting: Setting, rates: Rates) -> None:
        super().__init__(world, NAME)
        self._setting, self._rates = setting, rates
        self._kept: Kept = world.disk.setdefault(NAME, Kept())
        self.ledger = Ledger(setting.ledger)
        self._parked: ParkingLot[Asked, Args] = ParkingLot()
        self._has_changed = False
        self._free_at = world.now
        self.busy_s = 0.0
        self.num_ops = 0

    def begin(self) -> None:
        if self._kept.events:
            self.ledger = Ledger.replay(self._setting.ledger, self._kept.events)
            self.ledger.restart(self.world.now)
        else:
            self.ledger.describe_data(self._setting.num_prompts, "simulated")
        if self._setting.tightened_to is not None:
            self.ledger.tighten(self._setting.tightened_to)
        self._settle()
        self.every(self._setting.pace.tick_s, self._tick)

    def receive(self, src: str, message: Message) -> None:
        self.num_ops += 1
        self.busy_s += self._rates.buffer_op_s
        self._free_at = max(self._free_at, self.world.now) + self._rates.buffer_op_s
        self._has_changed |= message.op not in QUIET_OPS
        try:
            super().receive(src, message)
        except AsyncrlError as error:
            self.world.note("refused", op=message.op, src=src, error=type(error).__name__)
            if message.call:
                self._refuse(src, message.call, error)
        self._settle()

    # Replicas

    def on_lease(self, src: str, args: Args, call: int) -> None:
        if args["held"] is not None:
            self.ledger.keep_only(src, set(args["held"]))
        lane = ("lease", args["version"], args["want"] > 0)
        owner, wait_s, nothing = ("replica", src), args["wait_s"], dict[str, Any](grants=[])
        if (
            wait_s > LEASE_WAIT_S
        ):  # in production a call under an older version has ended by now, or soon will
            self._end_waits(owner)
        self._park(Asked(src, call), lambda: self._grant(src, args), nothing, wait_s, owner, lane)

    def on_renew(self, src: str, args: Args, call: int) -> None:
        self._reply(src, call, lost=self.ledger.renew(src, args["held"], self.world.now))

    def on_push(self, src: str, args: Args, call: int) -> None:
        ticket, attempt, num_tokens = args["ticket"], args["attempt"], args["num_tokens"]
        spans: Spans = args["spans"]
        result = self.ledger.judge_push(src, ticket, attempt)
        if result == "welcome":
            num_bytes = num_tokens * BYTES_PER_TOKEN + BYTES_PER_TRAJECTORY * self._setting.trained_samples
            num_bytes = min(num_bytes, self._setting.ledger.max_group_bytes)
            if self._setting.uniform_share and self.world.random.random() < self._setting.uniform_share:
                self.ledger.drop_uniform(ticket)
            else:
                self.ledger.store(ticket, num_tokens, num_bytes, (min(spans), max(spans)))
                self._kept.payloads[ticket] = (num_tokens, spans)
        self._reply(src, call, result=result)

    def on_fail(self, src: str, args: Args, call: int) -> None:
        self.ledger.fail(src, args["ticket"], args["attempt"])
        self._reply(src, call)

    def on_evaluated(self, src: str, args: Args, call: int) -> None:
        orders, number, version = self.ledger.evaluations, args["id"], args["version"]
        if orders.finish(number, version, TALLIES, args["part"]):
            evaluation = self.ledger.state.evaluations[number]
            if evaluation.is_done:
                self.world.note("evaluated", id=number, step=evaluation.step)
        self._reply(src, call, evaluate=orders.give_more(number, src, version))

    def on_release(self, src: str, args: Args, call: int) -> None:
        self.ledger.release(src, args["held"])
        self._reply(src, call)

    def on_retire(self, src: str, args: Args, call: int) -> None:
        name = args.get("replica", src)
        self._end_waits(("replica", name))
        self.ledger.retire(name)
        self._reply(src, call)

    # The learner

    def on_open(self, src: str, args: Args, call: int) -> None:
        token = self.ledger.open(src)
        kept = [(one.token, one.step) for one in self.ledger.checkpoints()]
        self._end_waits(LEARNER)
        self._reply(src, call, token=token, checkpoints=kept, steps_trained=self.ledger.state.steps_trained)

    def on_resume(self, src: str, args: Args, call: int) -> None:
        missing = [
            one.id for one in self.ledger.tickets_from(args["step"]) if one.id not in self._kept.payloads
        ]
        self.ledger.resume(args["token"], args["step"], missing, is_fork=args.get("is_fork", False))
        self.world.note("resumed", token=args["token"], step=args["step"])
        self._reply(src, call)

    def on_register_version(self, src: str, args: Args, call: int) -> None:
        number = self.ledger.register_version(args["token"], args["step"])
        self.world.note("registered", number=number, step=args["step"], token=args["token"])
        self._reply(src, call, number=number)

    def on_reserve(self, src: str, args: Args, call: int) -> None:
        self._park(Asked(src, call), lambda: self._reserve(args), {"groups": []}, args["wait_s"], LEARNER)

    def on_trained(self, src: str, args: Args, call: int) -> None:
        step, before = args["step"], self.ledger.state.steps_trained
        tickets = [one.id for one in self.ledger.state.by_step.get(step, ())]
        self.ledger.trained(args["token"], step, args["dropped"], args["lag_max"])
        if self.ledger.state.steps_trained > before:
            lineage = self.ledger.state.versions.lineage
            self.world.note("trained", step=step, lineage=lineage, tickets=tickets, lag_max=args["lag_max"])
        self._reply(src, call)

    def on_checkpointed(self, src: str, args: Args, call: int) -> None:
        self.ledger.checkpointed(args["token"], args["step"], args["digest"], args["kept"])
        self.world.note("checkpointed", step=args["step"], token=args["token"])
        self._reply(src, call)

    def on_request_evaluation(self, src: str, args: Args, call: int) -> None:
        number = self.ledger.request_evaluation(args["token"], args["step"])
        self.world.note("evaluation", id=number, step=args["step"])
        self._reply(src, call, id=number)

    # Time, and what waits

    def _tick(self) -> None:
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
        self._parked.add(Parked(asked, attempt, lambda: nothing, until, math.inf, owner, lane or owner))
        if wait_s < self._setting.pace.tick_s:
            self.world.at(until, self._do, self._settle, ())

    def _end_waits(self, owner: Owner) -> None:
        for parked in self._parked.of(owner):
            self._parked.remove(parked)
            self._end(parked)

    def _end(self, parked: Waiting) -> None:
        self._reply(*parked.request, **parked.last())

    def _settle(self) -> None:
        """Serve whom the change has unblocked, then write down what happened."""
        has_changed, self._has_changed = self._has_changed or self.ledger.has_news, False
        self._parked.end_turn(
            self.world.now,
            self._answers,
            self._end,
            has_changed=has_changed,
            are_alike=lambda: not self.ledger.evaluations.have_free_part,
        )
        self._keep_events()

    def _answers(self, parked: Waiting) -> bool:
        try:
            found = parked.attempt()
        except AsyncrlError as error:
            self._refuse(*parked.request, error)
            return True
        if parked.owner == LEARNER:  # a reservation drops and issues again what others may lease
            self._has_changed |= self.ledger.has_news
        if found is not None:
            self._reply(*parked.request, **found)
        return found is not None

    def _grant(self, src: str, args: Args) -> Args | None:
        version = args["version"]
        grants = self.ledger.lease(src, version, args["want"], self.world.now)
        order = self.ledger.evaluations.give(src, version, args["evaluating"])
        return {"grants": grants, "evaluate": order} if grants or order is not None else None

    def _reserve(self, args: Args) -> Args | None:
        token, step, have, now = args["token"], args["step"], args["have"], self.world.now
        if have is None:
            tickets = self.ledger.reserve(token, step, now)
        else:
            tickets = self.ledger.reserve_part(token, step, now, have, args["at_least"])
        return None if tickets is None else self._batch(tickets, step, have or ())

    def _batch(self, tickets: list[Ticket], step: int, have: Collection[int]) -> dict[str, Any]:
        payloads = self._kept.payloads
        groups = [(one.id, *payloads[one.id]) for one in tickets]
        is_whole = self.ledger.is_whole(step, [*have, *(one.id for one in tickets)])
        return {
            "groups": groups,
            "steps": dict(self.ledger.counted_versions(tickets)),
            "is_whole": is_whole,
        }

    def _keep_events(self) -> None:
        events = self.ledger.drain_events()
        if self._setting.keeps_journal:
            self._kept.events += events
        state = self.ledger.state
        for ticket in state.released:
            self._kept.payloads.pop(ticket, None)
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

    def _refuse(self, dst: str, call: int, error: AsyncrlError) -> None:
        self._reply(dst, call, error=error.message, is_fenced=isinstance(error, FencedError))

    def _answer_late(self, dst: str, call: int, args: Args) -> None:
        self.answer(dst, call, **args)
