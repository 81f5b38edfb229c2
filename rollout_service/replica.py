"""A rollout replica: leases groups, generates them, pushes them, and swaps weights under way.

    STARTING -> SYNCING -> READY -> DRAINING -> RETIRED      READY <-> PINNED (evaluation)
    READY -> SYNCING when a load failed: generation is paused until one works

lease loop   consumes: grants, evaluation orders    waits for: READY, a free slot, the buffer
             unblocked by: a swap, a finished group, wait_s          produces: group tasks
group task   consumes: one grant     waits for: the engine, the reward    produces: one push or one fail
sync loop    consumes: staged versions    waits for: the receiver, wait_s, a running evaluation
             produces: swaps and their reports
renew loop   waits for: the renewal interval    produces: renewed leases, cancelled groups

Invariant: what is pushed was generated whole under a lease; a group that fails in any way is
reported with a reason and never pushed. A drain gives back what is unfinished: its leases, or with
`resumes_partial` its tokens so far too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TypeVar

from asyncrl.buffer.messages import EvaluationOrder, LeaseGrant
from asyncrl.buffer.rules import replica as rules
from asyncrl.buffer.rules.replica import DrainStage, LeaseCall, Leasing, Tries
from asyncrl.core.errors import AsyncrlError, DataError, DeadlineExceeded, EngineError, ServiceFailed
from asyncrl.core.experience import Group
from asyncrl.core.obstacle import Cause, FailureStreak, Obstacle
from asyncrl.core.rpc.message import Done, Message
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.service_command import AnyCommand, Drain, Promote, Standing, unknown_command
from asyncrl.core.service_status import ReplicaStatus
from asyncrl.core.staleness import UNLOADED
from asyncrl.core.states import ServiceState
from rollout_service.engine.protocol import EngineDied, Interrupted
from rollout_service.evaluation.evaluator import Evaluator
from rollout_service.gateway.refusal import NobodyCame
from rollout_service.listening import listen_to
from rollout_service.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica_status import obstacles_of, with_parts
from rollout_service.rewards.score import RewardError, RewardsFailed
from rollout_service.sampling.groups import GroupRunner
from rollout_service.states import State, idle_cause
from weight_sync.memory.staging import Staged

log = logging.getLogger(__name__)

T = TypeVar("T")

STAGED_WAIT_S = 1.0  # the receiver's answer tells that the replica is fenced


class Replica:
    """The service. `run` owns the event loop; `status` and `command` come from other threads.

    Args:
        build: Makes the parts, in the event loop.
        is_standby: It follows the weights, and takes neither leases nor evaluations until `promote`.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        settings: ReplicaSettings,
        build: Callable[[], Awaitable[ReplicaParts]],
        *,
        is_standby: bool = False,
    ) -> None:
        self._runtime, self._name = runtime, name
        self._settings = settings
        self._build = build
        self._parts: ReplicaParts | None = None
        self._state = State.STARTING
        self._groups: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._leases: set[asyncio.Task[bool]] = set()
        self._tasks = asyncio.TaskGroup()
        self._counters: Counter[str] = Counter()
        self._load_failures = FailureStreak(Cause.WEIGHTS_REFUSED)
        self._group_failures = FailureStreak(Cause.GROUPS_FAIL)
        self._changed = asyncio.Event()
        self._weights_lock = asyncio.Lock()
        self._leasing = Leasing()
        self._is_standby = is_standby
        self._drain_asked, self._promote_asked = runtime.event(), runtime.event()
        self._grace_s = 0.0

    # Any thread

    def status(self) -> ReplicaStatus:
        """Return the state, the version served, and what was done so far."""
        told = ReplicaStatus(
            state=ServiceState(self._state.value),
            version=0,
            step=0,
            standby=self._is_standby,
            in_flight_groups=len(self._groups),
            counters=dict(self._counters),
            obstacles=self._obstacles(),
        )
        return told if self._parts is None else with_parts(told, self._parts)

    def _obstacles(self) -> tuple[Obstacle, ...]:
        found = self._load_failures.report() + self._group_failures.report()
        if self._parts is not None:
            found += tuple(obstacles_of(self._parts, is_ready=self._state is State.READY))
        return found

    def command(self, command: AnyCommand) -> Message:
        """Drain, or take leases after standing by."""
        match command:
            case Promote():
                self._is_standby = False
                self._promote_asked.set()
                return Done()
            case Drain(grace_s):
                self._grace_s = grace_s
                self._drain_asked.set()
                return Standing(ServiceState.DRAINING)
        raise unknown_command("a replica", command, "It knows 'drain' and 'promote'")

    def run(self, stop: Event) -> None:
        """Work until `stop` is set or a drain is done. Raises on an engine that died, or on a bug."""
        try:
            self._runtime.run_async(self._run(stop))
        except ExceptionGroup as group:
            failed = group.subgroup(AsyncrlError)
            if failed is None:
                raise
            first = next(_leaves(failed))
            raise ServiceFailed(f"{self._name} cannot go on: {first}") from group

    # The event loop

    async def _run(self, stop: Event) -> None:
        parts = self._parts = await self._build()
        try:
            await self._introduce(parts)
            await parts.engine.start()
            if parts.gateway is not None:
                await parts.gateway.start(on_demand=self._changed.set)
            if isinstance(parts.runner, GroupRunner):
                parts.runner.on_end = self._changed.set
            self._move(State.SYNCING)
            async with self._tasks:
                leasing = self._tasks.create_task(self._lease_loop(parts))
                # Groups that may still finish need their leases, and new versions.
                watching = [] if parts.gateway is None else [parts.gateway.watch()]
                keeping = [self._sync_loop(parts), self._renew_loop(parts), *watching]
                kept = [self._tasks.create_task(loop) for loop in keeping]
                await self._watch(stop)
                self._move(State.DRAINING)
                if parts.gateway is not None:
                    parts.gateway.drain()
                for task in (leasing, *self._leases):
                    task.cancel()
                await self._finish_groups(parts)
                for task in kept:
                    task.cancel()
            await self._say_farewell(parts)
        finally:
            if parts.gateway is not None:
                await parts.gateway.stop()
            if parts.reward is not None:
                await parts.reward.close()
            await parts.engine.shutdown()
            parts.buffer.close()
            parts.weights.close()
        self._move(State.RETIRED)

    async def _introduce(self, parts: ReplicaParts) -> None:
        """Give back what an earlier life under this name held, and describe the data."""
        end = asyncio.get_running_loop().time() + self._settings.start_deadline_s
        while True:
            try:
                await parts.buffer.retire()
                prompts = parts.prompts
                await parts.buffer.describe_data(prompts.num_prompts, prompts.digest, prompts.sources)
                return
            except DeadlineExceeded:
                if asyncio.get_running_loop().time() > end:
                    raise

    async def _watch(self, stop: Event) -> None:
        has_heard = listen_to(stop, self._drain_asked, self._promote_asked)
        was_standby = self._is_standby
        while not stop.is_set() and not self._drain_asked.is_set():
            await has_heard.wait()
            has_heard.clear()
            if was_standby and not self._is_standby:
                was_standby = False
                log.info("%s is promoted", self._name)
                self._note_idle_cause()
                self._changed.set()

    async def _lease_loop(self, parts: ReplicaParts) -> None:
        while True:
            self._changed.clear()
            is_fenced = parts.weights.is_fenced
            if rules.may_lease(self._state, is_fenced=is_fenced, is_standby=self._is_standby):
                self._lease_if_due(parts)
            await self._changed.wait()

    def _lease_if_due(self, parts: ReplicaParts) -> None:
        version, want = parts.engine.serving.number, self._num_wanted(parts)
        has_gateway = parts.gateway is not None
        call = self._leasing.next_call(version, want, self._groups, asks_when_full=has_gateway)
        if call is not None:
            task = self._tasks.create_task(self._lease(parts, call))
            self._leases.add(task)
            task.add_done_callback(partial(self._end_lease, call))

    async def _lease(self, parts: ReplicaParts, call: LeaseCall) -> bool:
        """Make the call, and do what its answer says; return whether there was one."""
        try:
            reply = await parts.buffer.lease(call.version, call.want, call.wait_s, call.held)
        except AsyncrlError as error:
            await self._note("lease_errors", error)
            return False
        for grant in reply.grants:
            self._begin_group(parts, grant)
        if reply.evaluate is not None:
            await self._evaluate(parts, reply.evaluate, call.version)
        return True

    def _end_lease(self, call: LeaseCall, task: asyncio.Task[bool]) -> None:
        self._leases.discard(task)
        has_ended = not (task.cancelled() or task.exception())
        self._leasing.end(call, is_answered=has_ended and task.result())
        self._changed.set()

    def _num_wanted(self, parts: ReplicaParts) -> int:
        """Return how many groups to ask for: with a gateway, none that no agent waits for."""
        max_groups, runner = self._settings.max_groups, parts.runner
        num_free = rules.count_free_groups(max_groups, 1, len(self._groups))
        if isinstance(runner, GroupRunner):
            num_free = runner.num_free(max_groups, len(self._groups))
        return num_free if parts.gateway is None else min(num_free, parts.gateway.manager.num_groups_wanted)

    def _begin_group(self, parts: ReplicaParts, grant: LeaseGrant) -> None:
        key = grant.key
        task = self._tasks.create_task(self._run_group(parts, grant))
        self._groups[key] = task
        task.add_done_callback(lambda _: self._end_group(key))
        self._note_idle_cause()

    def _end_group(self, key: tuple[int, int]) -> None:
        if self._state is not State.DRAINING:
            self._groups.pop(key, None)
        self._note_idle_cause()
        self._changed.set()

    def _note_idle_cause(self) -> None:
        """Tell the meter what the engine waits for while it has no request."""
        if self._parts is None:
            return
        cause = idle_cause(
            self._state,
            has_groups=bool(self._groups),
            is_fenced=self._parts.weights.is_fenced,
            is_standby=self._is_standby,
        )
        self._parts.engine.wait_for(cause)

    async def _run_group(self, parts: ReplicaParts, grant: LeaseGrant) -> None:
        try:
            carried = await self._fetch_carry(parts, grant) if grant.carry_attempt else None
            group = await parts.runner.run(grant, carried)
        except (EngineDied, RewardsFailed):
            raise  # the replica cannot go on
        except AsyncrlError as error:
            if isinstance(error, Interrupted) and self._state is State.DRAINING:
                return  # nothing to hand back but the lease: the farewell does
            await self._fail_group(parts, grant, error)
            return
        if not parts.runner.is_complete(group):
            await self._carry_group(parts, group)
            return
        try:
            fault_point("rollout.push", parts.engine.serving.step, grant.ticket)
            result = await self._repeat(lambda: parts.buffer.push(group))
            self._counters[f"push/{result}"] += 1
            self._group_failures.succeed()
        except AsyncrlError as error:
            if not isinstance(error, DeadlineExceeded):  # the buffer is there, and refuses it
                self._group_failures.fail(str(error))
            await self._note("push_errors", error)
        self._groups.pop(grant.key, None)  # done: a drain must not release it

    async def _fetch_carry(self, parts: ReplicaParts, grant: LeaseGrant) -> Group | None:
        """Return what an earlier attempt left. Without it, the group starts from its prompt."""
        try:
            carried = await self._repeat(lambda: parts.buffer.fetch_carry(grant.ticket, grant.attempt))
        except AsyncrlError as error:
            await self._note("carries_unread", error)
            return None
        if carried is None or not parts.runner.fits(grant, carried):
            self._counters["carries_unfit"] += 1
            return None
        self._counters["groups_resumed"] += 1
        return carried

    async def _carry_group(self, parts: ReplicaParts, group: Group) -> None:
        """Hand the beginning of a group back and end its lease; if that fails, the farewell ends it."""
        try:
            result = await parts.buffer.carry(group)
        except AsyncrlError as error:
            await self._note("carry_errors", error)
            return
        self._counters[f"carry/{result}"] += 1
        self._groups.pop((group.ticket, group.attempt), None)

    async def _fail_group(self, parts: ReplicaParts, grant: LeaseGrant, error: AsyncrlError) -> None:
        is_unopened = isinstance(error, NobodyCame)  # no attempt at the prompt
        self._counters["groups_unopened" if is_unopened else "groups_failed"] += 1
        if not (is_unopened or isinstance(error, RewardError)):  # the reward counts its own
            self._group_failures.fail(str(error))
        log.warning("group %d, attempt %d ended: %s", grant.ticket, grant.attempt, error)
        try:
            if is_unopened:
                await self._repeat(lambda: parts.buffer.release([grant.key]))
            else:
                reason = f"{type(error).__name__}: {error.message}"
                await self._repeat(lambda: parts.buffer.fail(grant.ticket, grant.attempt, reason))
        except AsyncrlError as fail_error:
            await self._note("fail_errors", fail_error)
        self._groups.pop(grant.key, None)

    async def _evaluate(self, parts: ReplicaParts, order: EvaluationOrder, asked_number: int) -> None:
        """Answer parts of an evaluation, pinned to one version, until none is left for this replica."""
        if parts.evaluator is None:
            raise DataError("an evaluation was ordered, but data.eval names no prompts")
        async with self._weights_lock:  # a swap would mix versions
            if not parts.engine.is_loaded:  # a load failed while the order came: generation is paused
                parts.buffer.forget_evaluation()
                return
            self._move(State.PINNED)
            try:
                await parts.weights.pin()
                number = parts.engine.serving.number
                more: EvaluationOrder | None = order
                if not rules.is_order_good(asked_number, number):  # swapped in between
                    parts.buffer.forget_evaluation()
                    more = (await parts.buffer.lease(number, 0, 0.0)).evaluate
                while more is not None:
                    more = await self._answer_part(parts, parts.evaluator, more, number)
            except EngineDied:
                raise  # the replica cannot go on
            except AsyncrlError as error:
                parts.buffer.forget_evaluation()  # the order will be handed out again
                await self._note("evaluation_errors", error)
            try:
                await self._repeat(parts.weights.unpin)  # pinned for ever it would fall behind without a word
            except AsyncrlError as error:  # the receiver is gone: the next one begins without a pin
                await self._note("calls_repeated", error)
            self._move(State.READY)

    async def _answer_part(
        self, parts: ReplicaParts, evaluator: Evaluator, order: EvaluationOrder, number: int
    ) -> EvaluationOrder | None:
        """Answer a part and report it; return the next one, if any."""
        tallies = await evaluator.run(order)
        fault_point("rollout.evaluated", order.part)
        more = await self._repeat(lambda: parts.buffer.evaluated(order, number, tallies))
        self._counters["evaluations"] += 1
        return more

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call that may be repeated until it is answered, or its tries are spent."""
        tries = Tries()
        while True:
            try:
                return await call()
            except DeadlineExceeded as error:
                if not tries.may_repeat():
                    raise
                await self._note("calls_repeated", error)

    async def _renew_loop(self, parts: ReplicaParts) -> None:
        while True:
            await asyncio.sleep(rules.renewal_interval_s(self._settings.lease_s))
            try:
                lost = await parts.buffer.renew(list(self._groups))
            except AsyncrlError as error:
                await self._note("renew_errors", error)
                continue
            for key in lost:
                if task := self._groups.get(key):
                    self._counters["groups_lost"] += 1
                    task.cancel()

    async def _sync_loop(self, parts: ReplicaParts) -> None:
        engine, weights = parts.engine, parts.weights
        while True:
            try:
                loaded_number = engine.serving.number if engine.is_loaded else UNLOADED
                staged = await weights.next_staged(loaded_number, STAGED_WAIT_S)
                self._note_idle_cause()
                self._changed.set()  # the poll also tells whether this replica is fenced
                if staged is not None:
                    async with self._weights_lock:
                        await self._swap(parts, staged)
            except EngineDied:
                raise  # the replica cannot go on
            except AsyncrlError as error:
                await self._note("sync_errors", error)

    async def _swap(self, parts: ReplicaParts, staged: Staged) -> None:
        number = staged.version.number
        try:
            await parts.engine.swap(staged)
        except EngineError as error:
            self._move(State.SYNCING)
            self._load_failures.fail(str(error))
            await parts.weights.report_loaded(number, ok=False, error=str(error))
            raise
        log.info(
            "serving version %d (step %d), swapped in %.3f s",
            number,
            staged.version.step,
            parts.engine.last_swap_s,
        )
        self._load_failures.succeed()
        self._move(State.READY)
        fault_point("rollout.swapped", staged.version.step)
        await parts.weights.report_loaded(number, ok=True)

    async def _finish_groups(self, parts: ReplicaParts) -> None:
        """Let groups in flight finish within the grace of the drain, hand back the rest, or cancel it."""
        tasks = list(self._groups.values())
        for stage, most_s in rules.plan_drain(self._grace_s, resumes_partial=self._settings.resumes_partial):
            unfinished = [task for task in tasks if not task.done()]
            if unfinished and (stage is DrainStage.FINISH or await self._interrupt(parts, most_s)):
                await asyncio.wait(unfinished, timeout=most_s)
        for task in tasks:
            task.cancel()

    async def _interrupt(self, parts: ReplicaParts, most_s: float) -> bool:
        try:
            await asyncio.wait_for(parts.engine.interrupt(), most_s)
        except (AsyncrlError, TimeoutError) as error:
            self._counters["interrupt_errors"] += 1
            log.warning("%s could not interrupt its requests: %s", self._name, error)
            return False
        return True

    async def _say_farewell(self, parts: ReplicaParts) -> None:
        try:
            if self._groups:
                await asyncio.wait_for(parts.buffer.release(list(self._groups)), rules.FAREWELL_DEADLINE_S)
            await asyncio.wait_for(parts.buffer.retire(), rules.FAREWELL_DEADLINE_S)
            await asyncio.wait_for(parts.weights.drain(), rules.FAREWELL_DEADLINE_S)
        except (AsyncrlError, TimeoutError) as error:  # the buffer is gone as well; leases expire
            log.info("%s left without farewell: %s", self._name, error)
        self._groups.clear()

    def _move(self, state: State) -> None:
        if self._state is State.DRAINING and state is not State.RETIRED:
            return
        if state is not self._state:
            log.info("%s: %s -> %s", self._name, self._state, state)
        self._state = state
        self._note_idle_cause()
        self._changed.set()

    async def _note(self, counter: str, error: AsyncrlError) -> None:
        """Count and log an error that a retry may cure, and wait a little."""
        self._counters[counter] += 1
        log.warning("%s: %s", counter, error)
        await asyncio.sleep(rules.RETRY_PAUSE_S)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
