"""A rollout replica from its start to its farewell, its commands and its status.

The work is in `leases`, `groups` and `weights`. Groups that may still finish during a drain need their
leases, and new versions: lease renewal and swaps go on until the last of them has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import msgspec

from asyncrl.buffer.rules import replica as rules
from asyncrl.core.errors import AsyncrlError, DeadlineExceeded, ServiceFailed
from asyncrl.core.obstacle import Obstacle
from asyncrl.core.rpc.message import Done, Message
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.service_command import AnyCommand, Drain, Promote, Standing, unknown_command
from asyncrl.core.states import ServiceState
from asyncrl.core.status.replica import EngineStatus, LimitStatus, ReplicaStatus
from rollout_service.engine.metered import BUSY, MeteredEngine
from rollout_service.replica.groups import GroupTasks
from rollout_service.replica.leases import Evaluations, LeaseLoop
from rollout_service.replica.lifecycle import Lifecycle
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.states import State, idle_cause
from rollout_service.replica.weights import WeightSwaps
from rollout_service.sampling.groups import GroupRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Work:
    """The parts of a replica that runs, and its loops over them."""

    parts: ReplicaParts
    groups: GroupTasks
    swaps: WeightSwaps
    leases: LeaseLoop


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
        self._work: _Work | None = None
        self._lifecycle = Lifecycle(name, is_standby=is_standby)
        self._tasks = asyncio.TaskGroup()
        self._drain_asked, self._promote_asked = runtime.event(), runtime.event()
        self._grace_s = 0.0

    # Any thread

    @property
    def parts(self) -> ReplicaParts | None:
        """The parts, once they are made."""
        return None if self._work is None else self._work.parts

    def status(self) -> ReplicaStatus:
        """Return the state, the version served, and what was done so far."""
        lifecycle, work = self._lifecycle, self._work
        told = ReplicaStatus(
            state=ServiceState(lifecycle.state.value),
            version=0,
            step=0,
            standby=lifecycle.is_standby,
            in_flight_groups=0 if work is None else len(work.groups),
            counters=dict(lifecycle.counters),
            obstacles=() if work is None else self._obstacles(work),
        )
        if work is None:
            return told
        limit = work.leases.limit
        told = msgspec.structs.replace(told, limit=LimitStatus(limit.places, limit.bound, limit.change))
        return with_parts(told, work.parts)

    def _obstacles(self, work: _Work) -> tuple[Obstacle, ...]:
        is_ready = self._lifecycle.state is State.READY
        own = work.swaps.failures.report() + work.groups.failures.report()
        return (*own, *obstacles_of(work.parts, is_ready=is_ready))

    def command(self, command: AnyCommand) -> Message:
        """Drain, or take leases after standing by."""
        match command:
            case Promote():
                self._lifecycle.is_standby = False
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
        parts, lifecycle = await self._build(), self._lifecycle
        work = self._work = self._make_work(parts)
        lifecycle.on_change = self._note_idle_cause
        try:
            await self._introduce(parts)
            await parts.engine.start()
            if parts.gateway is not None:
                await parts.gateway.start(on_demand=lifecycle.changed.set)
            if isinstance(parts.runner, GroupRunner):
                parts.runner.on_end = lifecycle.changed.set
            lifecycle.move(State.SYNCING)
            async with self._tasks:
                leasing = self._tasks.create_task(work.leases.run())
                watching = [] if parts.gateway is None else [parts.gateway.watch()]
                keeping = [work.swaps.run(), work.groups.keep_leases(), *watching]
                kept = [self._tasks.create_task(loop) for loop in keeping]
                await self._watch(stop)
                lifecycle.move(State.DRAINING)
                if parts.gateway is not None:
                    parts.gateway.drain()
                leasing.cancel()
                work.leases.cancel_calls()
                await work.groups.finish(self._grace_s)
                for task in kept:
                    task.cancel()
            await self._say_farewell(work)
        finally:
            if parts.gateway is not None:
                await parts.gateway.stop()
            if parts.reward is not None:
                await parts.reward.close()
            await parts.engine.shutdown()
            parts.buffer.close()
            parts.weights.close()
        lifecycle.move(State.RETIRED)

    def _make_work(self, parts: ReplicaParts) -> _Work:
        lifecycle, tasks = self._lifecycle, self._tasks
        swaps = WeightSwaps(parts, lifecycle)
        groups = GroupTasks(parts, self._settings, lifecycle, tasks)
        evaluations = Evaluations(parts, lifecycle, swaps.lock)
        leases = LeaseLoop(parts, self._settings.max_groups, lifecycle, groups, evaluations, tasks)
        return _Work(parts, groups, swaps, leases)

    async def _introduce(self, parts: ReplicaParts) -> None:
        """Give back what an earlier process under this name held, and describe the data."""
        end = asyncio.get_running_loop().time() + self._settings.start_deadline_s
        while True:
            try:
                await parts.buffer.deregister()
                prompts = parts.prompts
                await parts.buffer.describe_data(prompts.num_prompts, prompts.digest, prompts.sources)
                return
            except DeadlineExceeded:
                if asyncio.get_running_loop().time() > end:
                    raise

    async def _watch(self, stop: Event) -> None:
        """Return once the replica is to drain or to stop; note a promotion."""
        has_heard = _listen_to(stop, self._drain_asked, self._promote_asked)
        was_standby = self._lifecycle.is_standby
        while not stop.is_set() and not self._drain_asked.is_set():
            await has_heard.wait()
            has_heard.clear()
            if was_standby and not self._lifecycle.is_standby:
                was_standby = False
                log.info("%s is promoted", self._name)
                self._lifecycle.note_change()

    def _note_idle_cause(self) -> None:
        """Tell the meter what the engine waits for while it has no request."""
        work, lifecycle = self._work, self._lifecycle
        assert work is not None, "changes are noted once there are parts"
        cause = idle_cause(
            lifecycle.state,
            has_groups=bool(work.groups),
            is_fenced=work.parts.weights.is_fenced,
            is_standby=lifecycle.is_standby,
        )
        work.parts.engine.wait_for(cause)

    async def _say_farewell(self, work: _Work) -> None:
        try:
            await work.groups.release()
            await asyncio.wait_for(work.parts.buffer.deregister(), rules.FAREWELL_DEADLINE_S)
            await asyncio.wait_for(work.parts.weights.drain(), rules.FAREWELL_DEADLINE_S)
        except (AsyncrlError, TimeoutError) as error:  # the buffer is gone as well; leases expire
            log.info("%s left without farewell: %s", self._name, error)
        work.groups.forget()


def _listen_to(*events: Event) -> asyncio.Event:
    """Return what is set in the running loop whenever one of `events` is set, or was before."""
    loop, has_heard = asyncio.get_running_loop(), asyncio.Event()

    def hear() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has all ended
            loop.call_soon_threadsafe(has_heard.set)

    for event in events:
        event.on_set(hear)
    return has_heard


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def with_parts(told: ReplicaStatus, parts: ReplicaParts) -> ReplicaStatus:
    """Return the status of a replica with what its parts have to say."""
    return msgspec.structs.replace(
        told,
        version=parts.engine.serving.number,
        step=parts.engine.serving.step,
        child_pids=tuple(_child_pids(parts)),
        engine=_describe(parts.engine),
        reward=parts.reward.status() if parts.reward is not None else None,
        shaping=parts.overlong.status() if parts.overlong is not None else None,
        gateway=parts.gateway.status() if parts.gateway is not None else None,
    )


def obstacles_of(parts: ReplicaParts, *, is_ready: bool) -> Iterator[Obstacle]:
    """Yield what keeps the parts from their work; agents are expected at one that is ready."""
    if parts.reward is not None:
        yield from parts.reward.obstacles()
    if parts.gateway is not None and is_ready:
        yield from parts.gateway.obstacles()


def _describe(engine: MeteredEngine) -> EngineStatus:
    idle = engine.account()
    return EngineStatus(
        in_flight_requests=engine.num_in_flight,
        tokens=engine.num_tokens,
        trajectories=engine.num_completions,
        busy_s=idle.pop(BUSY, 0.0),
        idle_by_cause=idle,
        swaps=engine.num_swaps,
        last_swap_s=engine.last_swap_s,
        probe_gap=engine.probe_gap,
        cache=engine.cache_status(),
    )


def _child_pids(parts: ReplicaParts) -> Iterator[int]:
    yield from parts.engine.child_pids()
    if parts.reward is not None:
        yield from parts.reward.child_pids()
