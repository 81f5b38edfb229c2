"""The buffer: the real ledger behind one thread, its journal on the disk of the world.

  consumes: requests of replicas and of the learner     waits for: what a parked request needs
  unblocked by: any change of the ledger, time          produces: grants, batches
Invariant: nobody is answered before the journal has the events.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from typing import Any, NamedTuple

from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import State, Ticket
from asyncrl.errors import AsyncrlError, FencedError
from asyncrl.sim.actors.evaluation import TALLIES
from asyncrl.sim.rates import Rates
from asyncrl.sim.setting import NEVER, Setting
from asyncrl.sim.world import Actor, Args, Message, World

NAME = "buffer.0"
BYTES_PER_TOKEN = 9
BYTES_PER_TRAJECTORY = 64
Spans = Counter[int]
"""Tokens by the version number that sampled them."""


class Parked(NamedTuple):
    """A request that waits."""

    src: str
    call: int
    args: Args


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
        self._leases: dict[int, deque[Parked]] = {}
        self._reserve: Parked | None = None
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
        try:
            super().receive(src, message)
        except AsyncrlError as error:
            self.world.note("refused", op=message.op, src=src, error=type(error).__name__)
            if message.call:
                self._refuse(src, message.call, error)
        self._settle()

    # Replicas

    def on_lease(self, src: str, args: Args, call: int) -> None:
        self._drop_waits(src)
        if args["held"] is not None:
            self.ledger.keep_only(src, set(args["held"]))
        parked = Parked(src, call, args)
        if self._grant(parked):
            return
        if args["wait_s"] == 0.0:
            self._reply(src, call, grants=[])
            return
        self._leases.setdefault(args["version"], deque()).append(parked)
        self.after(args["wait_s"], self._give_up, parked)

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
        self._drop_waits(name)
        self.ledger.retire(name)
        self._reply(src, call)

    # The learner

    def on_open(self, src: str, args: Args, call: int) -> None:
        token = self.ledger.open(src)
        kept = [(one.token, one.step) for one in self.ledger.checkpoints()]
        self._reserve = None
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
        self._reserve = Parked(src, call, args)
        if not self._try_reserve() and args["wait_s"] != NEVER:
            self.after(args["wait_s"], self._give_up_reserve, call)

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
        self._settle()

    def _settle(self) -> None:
        """Serve whom the change has unblocked, then write down what happened."""
        if self._reserve is not None:
            self._try_reserve()
        for version in list(self._leases):
            self._serve(version)
        self._keep_events()

    def _serve(self, version: int) -> None:
        waiting = self._leases[version]
        while waiting and self._grant(waiting[0]):
            waiting.popleft()
        if not waiting:
            del self._leases[version]

    def _grant(self, parked: Parked) -> bool:
        args = parked.args
        grants = self.ledger.lease(parked.src, args["version"], args["want"], self.world.now)
        order = None
        if self._setting.eval_every:
            order = self.ledger.evaluations.give(parked.src, args["version"], args["evaluating"])
        if not grants and order is None:
            return False
        self._reply(parked.src, parked.call, grants=grants, evaluate=order)
        return True

    def _drop_waits(self, replica: str) -> None:
        """Answer what a replica left parked: it asks anew, or is gone."""
        for version, waiting in list(self._leases.items()):
            for parked in [one for one in waiting if one.src == replica]:
                waiting.remove(parked)
                self._reply(replica, parked.call, grants=[])
            if not waiting:
                del self._leases[version]

    def _give_up(self, parked: Parked) -> None:
        waiting = self._leases.get(parked.args["version"], ())
        if parked in waiting:
            waiting.remove(parked)  # type: ignore[union-attr]
            self._reply(parked.src, parked.call, grants=[])

    def _try_reserve(self) -> bool:
        parked = self._reserve
        assert parked is not None
        have = parked.args.get("have")
        if self._are_too_few(have):
            return False  # the usual case, at the price of two look-ups
        try:
            tickets = self._take(parked.args["token"], parked.args["step"], have)
        except AsyncrlError as error:
            self._reserve = None
            self._reply(
                parked.src, parked.call, error=error.message, is_fenced=isinstance(error, FencedError)
            )
            return True
        if tickets is None:
            return False
        self._reserve = None
        self._reply(parked.src, parked.call, **self._batch(tickets, parked.args["step"], have or ()))
        return True

    def _are_too_few(self, have: Collection[int] | None) -> bool:
        state = self.ledger.state
        num_there = state.counts[State.STORED] + state.counts[State.RESERVED]
        if have is not None:
            return num_there <= len(have)
        return num_there < min(self._setting.ledger.groups_per_step, state.batch_size(state.steps_trained))

    def _take(self, token: int, step: int, have: Collection[int] | None) -> list[Ticket] | None:
        if have is None:
            return self.ledger.reserve(token, step, self.world.now)
        return self.ledger.reserve_part(token, step, self.world.now, have, self._setting.least_part)

    def _batch(self, tickets: list[Ticket], step: int, have: Collection[int]) -> dict[str, Any]:
        payloads = self._kept.payloads
        groups = [(one.id, *payloads[one.id]) for one in tickets]
        is_whole = self.ledger.is_whole(step, [*have, *(one.id for one in tickets)])
        return {
            "groups": groups,
            "steps": dict(self.ledger.counted_versions(tickets)),
            "is_whole": is_whole,
        }

    def _give_up_reserve(self, call: int) -> None:
        if self._reserve is not None and self._reserve.call == call:
            parked, self._reserve = self._reserve, None
            self._reply(parked.src, parked.call, groups=[])

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
