"""Leases and evaluation orders of a replica: it asks for as much as it can generate, and begins what it gets.

lease loop   consumes: grants, evaluation orders    waits for: READY, a free slot, the buffer
             unblocked by: a swap, a finished group, wait_s          produces: group tasks
"""

from __future__ import annotations

import asyncio
from functools import partial

from asyncrl.buffer.messages import EvaluationOrder
from asyncrl.buffer.rules import replica as rules
from asyncrl.buffer.rules.replica import LeaseCall, Leasing
from asyncrl.core.errors import AsyncrlError, DataError
from asyncrl.core.runtime.faults import fault_point
from rollout_service.engine.protocol import EngineDied
from rollout_service.evaluation.evaluator import Evaluator
from rollout_service.replica.concurrency import Limit
from rollout_service.replica.groups import GroupTasks
from rollout_service.replica.lifecycle import Lifecycle
from rollout_service.replica.parts import ReplicaParts
from rollout_service.replica.states import State
from rollout_service.sampling.groups import GroupRunner


class Evaluations:
    """Parts of evaluations, answered by one replica with one version each.

    Args:
        lock: Of the weights: a swap would mix versions.
    """

    def __init__(self, parts: ReplicaParts, lifecycle: Lifecycle, lock: asyncio.Lock) -> None:
        self._parts, self._lifecycle = parts, lifecycle
        self._lock = lock

    async def run(self, order: EvaluationOrder, asked_number: int) -> None:
        """Answer parts, pinned to one version, until none is left for this replica.

        Args:
            asked_number: The version that the replica served when it was given the order.
        """
        parts, lifecycle = self._parts, self._lifecycle
        if parts.evaluator is None:
            raise DataError("an evaluation was ordered, but data.eval names no prompts")
        async with self._lock:
            if not parts.engine.is_loaded:  # a load failed while the order came: generation is paused
                parts.buffer.forget_evaluation()
                return
            lifecycle.move(State.PINNED)
            try:
                await parts.weights.pin()
                number = parts.engine.serving.number
                more: EvaluationOrder | None = order
                if not rules.is_order_good(asked_number, number):  # swapped in between
                    parts.buffer.forget_evaluation()
                    more = (await parts.buffer.lease(number, 0, 0.0)).evaluate
                while more is not None:
                    more = await self._answer(parts.evaluator, more, number)
            except EngineDied:
                raise  # the replica cannot go on
            except AsyncrlError as error:
                parts.buffer.forget_evaluation()  # the order will be handed out again
                await lifecycle.note("evaluation_errors", error)
            try:
                await lifecycle.repeat(parts.weights.unpin)  # pinned for ever it would fall behind unseen
            except AsyncrlError as error:  # the receiver is gone: the next one begins without a pin
                await lifecycle.note("calls_repeated", error)
            lifecycle.move(State.READY)

    async def _answer(
        self, evaluator: Evaluator, order: EvaluationOrder, number: int
    ) -> EvaluationOrder | None:
        """Answer a part and report it; return the next one, if any."""
        tallies = await evaluator.run(order)
        fault_point("rollout.evaluated", order.part)
        buffer = self._parts.buffer
        more = await self._lifecycle.repeat(lambda: buffer.evaluated(order, number, tallies))
        self._lifecycle.counters["evaluations"] += 1
        return more


class LeaseLoop:
    """See the module.

    Args:
        max_groups: In flight, with all of their samples.
        tasks: Runs the calls.

    Attributes:
        limit: Of unfinished samples; with a gateway, of groups.
    """

    def __init__(
        self,
        parts: ReplicaParts,
        max_groups: int,
        lifecycle: Lifecycle,
        groups: GroupTasks,
        evaluations: Evaluations,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._parts = parts
        per_group = parts.runner.num_samples if isinstance(parts.runner, GroupRunner) else 1
        self.limit = Limit.at_bound(max_groups * per_group, per_group)
        self._lifecycle = lifecycle
        self._groups, self._evaluations = groups, evaluations
        self._tasks = tasks
        self._calls: set[asyncio.Task[bool]] = set()
        self._leasing = Leasing()

    async def run(self) -> None:
        """Ask for leases whenever the replica may have more, until cancelled."""
        lifecycle = self._lifecycle
        while True:
            lifecycle.changed.clear()
            is_fenced = self._parts.weights.is_fenced
            if rules.may_lease(lifecycle.state, is_fenced=is_fenced, is_standby=lifecycle.is_standby):
                self._lease_if_due()
            await lifecycle.changed.wait()

    def cancel_calls(self) -> None:
        """Wait for no answer any more."""
        for call in self._calls:
            call.cancel()

    def _lease_if_due(self) -> None:
        version, has_gateway = self._parts.engine.serving.number, self._parts.gateway is not None
        call = self._leasing.next_call(
            version, self._num_wanted(), self._groups.keys, asks_when_full=has_gateway
        )
        if call is not None:
            task = self._tasks.create_task(self._lease(call))
            self._calls.add(task)
            task.add_done_callback(partial(self._end_call, call))

    async def _lease(self, call: LeaseCall) -> bool:
        """Make the call, and do what its answer says; return whether there was one."""
        try:
            reply = await self._parts.buffer.lease(call.version, call.want, call.wait_s, call.held)
        except AsyncrlError as error:
            await self._lifecycle.note("lease_errors", error)
            return False
        for grant in reply.grants:
            self._groups.begin(grant)
        if reply.evaluate is not None:
            await self._evaluations.run(reply.evaluate, call.version)
        return True

    def _end_call(self, call: LeaseCall, task: asyncio.Task[bool]) -> None:
        self._calls.discard(task)
        has_ended = not (task.cancelled() or task.exception())
        self._leasing.end(call, is_answered=has_ended and task.result())
        self._lifecycle.changed.set()

    def _num_wanted(self) -> int:
        """Return how many groups to ask for: with a gateway, none that no agent waits for."""
        runner, gateway, num_groups = self._parts.runner, self._parts.gateway, len(self._groups)
        num_unfinished = runner.num_unfinished(num_groups) if isinstance(runner, GroupRunner) else num_groups
        self._look(num_unfinished)
        num_free = rules.count_free_groups(self.limit.places, self.limit.least, num_unfinished)
        return num_free if gateway is None else min(num_free, gateway.manager.num_groups_wanted)

    def _look(self, num_unfinished: int) -> None:
        """Move the limit by what the engine tells of its cache; one that tells nothing keeps the bound."""
        engine, before = self._parts.engine, self.limit.places
        if (cache := engine.cache_status()) is not None:
            self.limit = self.limit.step(cache, num_unfinished, engine.num_completions)
        if self.limit.places != before:
            self._lifecycle.counters[f"limit/{self.limit.change}"] += 1
