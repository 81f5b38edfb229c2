"""A rollout replica: leases groups, generates them, pushes them, and swaps weights under way.

    STARTING -> SYNCING -> READY -> DRAINING -> RETIRED      READY <-> PINNED (evaluation)
    READY -> SYNCING when a load failed: generation is paused until one works

lease loop   consumes: grants, evaluation orders    waits for: READY, a free slot, the buffer
             unblocked by: a swap, a finished group, wait_s          produces: group tasks
group task   consumes: one grant     waits for: the engine, the reward    produces: one push or one fail
sync loop    consumes: staged versions    waits for: the receiver, wait_s, a running evaluation
             produces: swaps and their reports
renew loop   waits for: a third of the lease time    produces: renewed leases, cancelled groups

Invariant: what is pushed was generated whole under a lease; a group that fails in any way is
reported with a reason and never pushed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from asyncrl.buffer.client import EvaluationOrder, LeaseGrant, ReplicaClient
from asyncrl.errors import AsyncrlError, DataError, DeadlineExceeded, EngineError, ServiceFailed
from asyncrl.faults import fault_point
from asyncrl.versions import UNLOADED
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.protocol import EngineDied
from rollout_service.evaluation import Evaluator
from rollout_service.groups import GroupRunner
from rollout_service.prompts import PromptSet
from rollout_service.rewards.shaping import Overlong
from weight_sync.memory.staging import Staged

log = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_WAIT_S = 1.0
STAGED_WAIT_S = 1.0
ERROR_PAUSE_S = 0.5
WATCH_S = 0.05
CALL_ATTEMPTS = 6
FAREWELL_DEADLINE_S = 2.0


class State(StrEnum):
    """Where a replica stands."""

    STARTING = "STARTING"
    SYNCING = "SYNCING"
    READY = "READY"
    PINNED = "PINNED"
    DRAINING = "DRAINING"
    RETIRED = "RETIRED"


class WeightLink(Protocol):
    """The receiver beside this replica. `is_fenced`: no leases until the replica has caught up."""

    is_fenced: bool

    async def next_staged(self, serving_number: int, wait_s: float) -> Staged | None: ...

    async def report_loaded(self, number: int, ok: bool, error: str = "") -> None: ...

    async def pin(self) -> None: ...

    async def unpin(self) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ReplicaSettings:
    """How much a replica holds at once, and how it keeps it.

    Attributes:
        max_groups: Groups in flight.
        lease_s: Lease time; leases are renewed after a third of it.
        start_deadline_s: How long the buffer may take to answer for the first time.
    """

    max_groups: int
    lease_s: float
    start_deadline_s: float


@dataclass(frozen=True)
class ReplicaParts:
    """What a replica is built of; made in `run`, because loading takes time."""

    engine: MeteredEngine
    buffer: ReplicaClient
    weights: WeightLink
    runner: GroupRunner
    evaluator: Evaluator | None
    prompts: PromptSet
    overlong: Overlong | None = None


class Replica:
    """The service. `run` owns the event loop; `status` and `command` come from other threads.

    Args:
        build: Makes the parts, in the event loop.
    """

    def __init__(
        self, name: str, settings: ReplicaSettings, build: Callable[[], Awaitable[ReplicaParts]]
    ) -> None:
        self._name = name
        self._settings = settings
        self._build = build
        self._parts: ReplicaParts | None = None
        self._state = State.STARTING
        self._groups: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._leases: set[asyncio.Task[None]] = set()
        self._tasks = asyncio.TaskGroup()
        self._counters: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._weights_lock = asyncio.Lock()
        self._drain_asked = threading.Event()
        self._grace_s = 0.0

    # Any thread

    def status(self) -> dict[str, Any]:
        """Return the state, the version served, and what was done so far."""
        status: dict[str, Any] = {"state": self._state.value, "in_flight_groups": len(self._groups)}
        status["counters"] = dict(self._counters)
        if self._parts is None:
            return {**status, "version": 0, "step": 0, "child_pids": []}
        engine = self._parts.engine
        busy_s, idle_s = engine.seconds()
        return {
            **status,
            "version": engine.serving.number,
            "step": engine.serving.step,
            "in_flight_requests": engine.num_in_flight,
            "tokens": engine.num_tokens,
            "trajectories": engine.num_completions,
            "busy_s": busy_s,
            "idle_s": idle_s,
            "swaps": engine.num_swaps,
            "last_swap_s": engine.last_swap_s,
            "child_pids": engine.child_pids(),
            **({} if self._parts.overlong is None else self._parts.overlong.counts()),
        }

    def command(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Obey `drain` (`grace_s`: how long groups in flight may still finish; default 0)."""
        if name != "drain":
            raise ServiceFailed(f"a replica knows no command '{name}'", hint="It knows 'drain'")
        self._grace_s = float(args.get("grace_s", 0.0))
        self._drain_asked.set()
        return {"state": State.DRAINING.value}

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set or a drain is done. Raises on an engine that died, or on a bug."""
        try:
            asyncio.run(self._run(stop))
        except ExceptionGroup as group:
            failed = group.subgroup(AsyncrlError)
            if failed is None:
                raise
            first = next(_leaves(failed))
            raise ServiceFailed(f"{self._name} cannot go on: {first}") from group

    # The event loop

    async def _run(self, stop: threading.Event) -> None:
        parts = self._parts = await self._build()
        try:
            await self._introduce(parts)
            await parts.engine.start()
            self._move(State.SYNCING)
            async with self._tasks:
                loops = [self._sync_loop(parts), self._lease_loop(parts), self._renew_loop(parts)]
                running = [self._tasks.create_task(loop) for loop in loops]
                await self._watch(stop)
                self._move(State.DRAINING)
                for task in (*running, *self._leases):
                    task.cancel()
                await self._finish_groups()
            await self._say_farewell(parts)
        finally:
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
                await parts.buffer.describe_data(parts.prompts.num_prompts, parts.prompts.digest)
                return
            except DeadlineExceeded:
                if asyncio.get_running_loop().time() > end:
                    raise

    async def _watch(self, stop: threading.Event) -> None:
        while not stop.is_set() and not self._drain_asked.is_set():
            await asyncio.sleep(WATCH_S)

    async def _lease_loop(self, parts: ReplicaParts) -> None:
        call: asyncio.Task[None] | None = None
        asked_version = 0
        while True:
            self._changed.clear()
            version = parts.engine.serving.number
            is_ready = self._state is State.READY and not parts.weights.is_fenced
            may_ask = is_ready and self._num_free_slots > 0
            if may_ask and (call is None or call.done() or version != asked_version):
                # A call parked under an older version stays out: its grants are good, only fewer.
                call, asked_version = self._tasks.create_task(self._lease(parts, version)), version
                self._leases.add(call)
                call.add_done_callback(self._end_lease)
            await self._changed.wait()

    async def _lease(self, parts: ReplicaParts, version: int) -> None:
        try:
            reply = await parts.buffer.lease(version, self._num_free_slots, LEASE_WAIT_S)
        except AsyncrlError as error:
            await self._note("lease_errors", error)
            return
        for grant in reply.grants:
            self._begin_group(parts, grant)
        if reply.evaluate is not None:
            await self._evaluate(parts, reply.evaluate)

    def _end_lease(self, call: asyncio.Task[None]) -> None:
        self._leases.discard(call)
        self._changed.set()

    @property
    def _num_free_slots(self) -> int:
        return self._settings.max_groups - len(self._groups)

    def _begin_group(self, parts: ReplicaParts, grant: LeaseGrant) -> None:
        key = grant.key
        task = self._tasks.create_task(self._run_group(parts, grant))
        self._groups[key] = task
        task.add_done_callback(lambda _: self._end_group(key))

    def _end_group(self, key: tuple[int, int]) -> None:
        if self._state is not State.DRAINING:
            self._groups.pop(key, None)
        self._changed.set()

    async def _run_group(self, parts: ReplicaParts, grant: LeaseGrant) -> None:
        try:
            group = await parts.runner.run(grant)
        except EngineDied:
            raise  # the replica cannot go on
        except AsyncrlError as error:
            await self._fail_group(parts, grant, error)
            return
        try:
            fault_point("rollout.push", parts.engine.serving.step)
            result = await self._repeat(lambda: parts.buffer.push(group))
            self._counters[f"push/{result}"] += 1
        except AsyncrlError as error:
            await self._note("push_errors", error)
        self._groups.pop(grant.key, None)  # done: a drain must not release it

    async def _fail_group(self, parts: ReplicaParts, grant: LeaseGrant, error: AsyncrlError) -> None:
        self._counters["groups_failed"] += 1
        log.warning("group %d, attempt %d failed: %s", grant.ticket, grant.attempt, error)
        try:
            await parts.buffer.fail(grant.ticket, grant.attempt, f"{type(error).__name__}: {error.message}")
        except AsyncrlError as fail_error:
            await self._note("fail_errors", fail_error)
        self._groups.pop(grant.key, None)

    async def _evaluate(self, parts: ReplicaParts, order: EvaluationOrder) -> None:
        if parts.evaluator is None:
            raise DataError("an evaluation was ordered, but data.eval names no prompts")
        async with self._weights_lock:  # a swap would mix versions
            self._move(State.PINNED)
            try:
                await parts.weights.pin()
                metrics = await parts.evaluator.run(order.id)
                number = parts.engine.serving.number
                await self._repeat(lambda: parts.buffer.evaluated(order, number, metrics))
                self._counters["evaluations"] += 1
            except EngineDied:
                raise  # the replica cannot go on
            except AsyncrlError as error:
                parts.buffer.forget_evaluation()  # the order will be handed out again
                await self._note("evaluation_errors", error)
            await self._repeat(parts.weights.unpin)  # pinned for ever it would fall behind without a word
            self._move(State.READY)

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call that may be repeated until it is answered, at most `CALL_ATTEMPTS` times."""
        for _ in range(CALL_ATTEMPTS - 1):
            try:
                return await call()
            except DeadlineExceeded as error:
                await self._note("calls_repeated", error)
        return await call()

    async def _renew_loop(self, parts: ReplicaParts) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            try:  # with no groups too: it is the heartbeat of an evaluation
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
            await parts.weights.report_loaded(number, ok=False, error=str(error))
            raise
        log.info(
            "serving version %d (step %d), swapped in %.3f s",
            number,
            staged.version.step,
            parts.engine.last_swap_s,
        )
        self._move(State.READY)
        fault_point("rollout.swapped", staged.version.step)
        await parts.weights.report_loaded(number, ok=True)

    async def _finish_groups(self) -> None:
        """Let groups in flight finish within the grace of the drain, then cancel the rest."""
        tasks = list(self._groups.values())
        if tasks and self._grace_s:
            await asyncio.wait(tasks, timeout=self._grace_s)
        for task in tasks:
            task.cancel()

    async def _say_farewell(self, parts: ReplicaParts) -> None:
        try:
            if self._groups:
                await asyncio.wait_for(parts.buffer.release(list(self._groups)), FAREWELL_DEADLINE_S)
            await asyncio.wait_for(parts.buffer.retire(), FAREWELL_DEADLINE_S)
            await asyncio.wait_for(parts.weights.drain(), FAREWELL_DEADLINE_S)
        except (
            AsyncrlError,
            TimeoutError,
        ) as error:  # the buffer is gone as well; leases expire by themselves
            log.info("%s left without farewell: %s", self._name, error)
        self._groups.clear()

    def _move(self, state: State) -> None:
        if self._state is State.DRAINING and state is not State.RETIRED:
            return
        if state is not self._state:
            log.info("%s: %s -> %s", self._name, self._state, state)
        self._state = state
        self._changed.set()

    async def _note(self, counter: str, error: AsyncrlError) -> None:
        """Count and log an error that a retry may cure, and wait a little."""
        self._counters[counter] += 1
        log.warning("%s: %s", counter, error)
        await asyncio.sleep(ERROR_PAUSE_S)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
