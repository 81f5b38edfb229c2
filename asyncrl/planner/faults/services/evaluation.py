"""A replica's evaluations, as `rollout_service.replica` makes them: pin, answer parts, report, unpin.

Owns which order the replica is at work on, and the lock that keeps a swap from mixing versions.
Never pushes an answer. Invariant: it reports the version that it served from the pin to the report.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.core.errors import AsyncrlError
from asyncrl.core.metrics.tallies import Tally, tally_values
from asyncrl.core.rpc import Reply
from asyncrl.planner.faults.checks.evaluations import ASKED, NODE, mark_of
from asyncrl.planner.faults.checks.observer import Observer
from asyncrl.planner.faults.kernel.process import Connection, Process
from asyncrl.planner.faults.kernel.tasks import Lock
from asyncrl.planner.faults.services.engine import HELD_OUT_IDS, Engine, Writing

CALL_S, ERROR_PAUSE_S = 10.0, 0.5
QUANTUM_S, TOKENS_PER_QUANTUM = 0.2, 2
TAKE_UP_S = 0.02
NO_TICKET = 0
"""Tickets count from 1, so the seeds of ticket 0 are free for evaluations."""

Order = Mapping[str, Any]
Call = Callable[..., Awaitable[Reply]]
"""Of the buffer: operation, deadline, arguments."""


@dataclass(frozen=True)
class HeldOut:
    """What evaluations ask.

    Attributes:
        num_prompts: So many, answered once each. mean_tokens: Of an answer.
        unusable: The prompt whose answer makes a result that no buffer takes, -1 for none.
    """

    num_prompts: int
    mean_tokens: int
    unusable: int = -1


class Evaluations:
    """See the module.

    Args:
        who: How the process names itself to its receiver. link: To that one.
        call, repeat: As of `ReplicaProcess`. move: Tells the replica its state.

    Attributes:
        current: The order that the replica is at work on, by its id.
        weights_lock: Held while an evaluation goes on, and while a version is loaded.
    """

    def __init__(
        self,
        process: Process,
        who: Mapping[str, Any],
        engine: Engine,
        asked: tuple[int, HeldOut],
        link: Connection,
        call: Call,
        repeat: Callable[[Callable[[], Awaitable[Reply]]], Awaitable[Reply]],
        move: Callable[[str], None],
        observer: Observer,
    ) -> None:
        self._process, self._engine, self._link, self._observer = process, engine, link, observer
        self._run_seed, self._held_out = asked
        self._call, self._repeat, self._move = call, repeat, move
        self._who, self._num_pins = who, 0
        self.current: int | None = None
        self.weights_lock = Lock()

    def take(self, lease: Mapping[str, Any]) -> Order | None:
        """Return the order in the answer to a lease, if there is one that is not under way."""
        order: Order | None = lease["evaluate"]
        if order is None or order["id"] == self.current:
            return None
        self.current = order["id"]
        return order

    async def run(self, order: Order, asked_number: int) -> None:
        """Answer parts of an evaluation, pinned to one version, until none is left for this replica."""
        self._pass("ordered")
        await self._process.sleep(TAKE_UP_S)
        async with self.weights_lock:
            if not self._engine.is_loaded:
                self.current = None
                return
            self._move("PINNED")
            try:
                await self._answer_parts(order, asked_number)
            except AsyncrlError:
                self.current = None
                await self._process.sleep(ERROR_PAUSE_S)
            self._pass("answered all")
            try:
                await self._repeat(lambda: self._pin("unpin"))
            except AsyncrlError:  # the next receiver begins without a pin
                await self._process.sleep(ERROR_PAUSE_S)
            self._pass("unpinned")
            self._move("READY")

    async def _answer_parts(self, order: Order, asked_number: int) -> None:
        await self._pin("pin")
        self._pass("pinned")
        number = self._engine.label
        more: Order | None = order
        if number != asked_number:  # swapped in between: the order holds for the other version
            self.current = None
            wanted = {"version": number, "want": 0, "wait_s": 0.0, "evaluating": None}
            more = self.take((await self._call("lease", CALL_S, **wanted)).args)
        while more is not None:
            more = await self._answer_part(more, number)

    async def _pin(self, op: str) -> Reply:
        self._num_pins += 1
        return await self._link.call(op, (), CALL_S, **self._who, seq=self._num_pins)

    async def _answer_part(self, order: Order, number: int) -> Order | None:
        """Answer a part and report it; return the next one, if any."""
        prompts = range(self._held_out.num_prompts)[order["part"] :: order["num_parts"]]
        answers = [self._begin(prompt) for prompt in prompts]
        while not all(answer.is_done for answer in answers):
            await self._process.sleep(QUANTUM_S)
            self._pass("answering")
            if self._engine.is_loaded:
                for answer in answers:
                    answer.grow(TOKENS_PER_QUANTUM, self._engine.label, self._engine.node)
        tokens = [token for answer in answers for token in answer.tokens[0]]
        self._observer.answered(self._process.name, order["id"], number, tokens)
        report = {"id": order["id"], "part": order["part"], "version": number}
        metrics = {name: list(tally) for name, tally in self._tally(prompts, answers).items()}
        reply = await self._repeat(lambda: self._call("evaluated", CALL_S, metrics=metrics, **report))
        self._pass("reported")
        more: Order | None = reply.args["more"]
        if more is None and self.current == order["id"]:
            self.current = None
        return more

    def _begin(self, prompt: int) -> Writing:
        dice = random.Random(sample_seed(self._run_seed, NO_TICKET, prompt))
        length = max(1, round(dice.lognormvariate(0, 0.8) * self._held_out.mean_tokens))
        length = min(3 * self._held_out.mean_tokens, length)
        return Writing(NO_TICKET, 0, (length,), prompt_ids=HELD_OUT_IDS)

    def _tally(self, prompts: Sequence[int], answers: Sequence[Writing]) -> dict[str, Tally]:
        """Return which weights answered, and a sum that tells each prompt which was answered once."""
        nodes = tally_values([float(answer.tokens[0][-1][1]) for answer in answers])
        asked = Tally(0, sum(mark_of(prompt) for prompt in prompts))
        if self._held_out.unusable in prompts:
            asked = Tally(0, float("nan"))
        return {NODE: nodes, ASKED: asked}

    def _pass(self, point: str) -> None:
        self._process.board.pass_point(self._process, point)
