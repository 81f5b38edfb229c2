"""Groups in flight: each is generated under a lease by a task of its own; pushed, or failed.

group task   consumes: one grant     waits for: the engine, the reward    produces: one push or one fail
renew loop   waits for: the renewal interval    produces: renewed leases, cancelled groups

Invariant: what is pushed was generated whole under a lease; a group that fails in any way is
reported with a reason and never pushed. A drain gives back what is unfinished: its leases, or with
`resumes_partial` its tokens so far too.
"""

from __future__ import annotations

import asyncio
import logging

from asyncrl.buffer.messages import LeaseGrant
from asyncrl.buffer.rules import replica as rules
from asyncrl.buffer.rules.replica import DrainStage
from asyncrl.core.errors import AsyncrlError, DeadlineExceeded
from asyncrl.core.experience import Group
from asyncrl.core.obstacle import Cause, FailureStreak
from asyncrl.core.runtime.faults import fault_point
from rollout_service.engine.protocol import EngineDied, Interrupted
from rollout_service.gateway.refusal import EpisodeFailed, NobodyCame
from rollout_service.replica.lifecycle import Lifecycle
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.states import State
from rollout_service.rewards.score import RewardError, RewardsFailed
from rollout_service.sampling.turn_journal import Journal, LeaseLost

log = logging.getLogger(__name__)

Key = tuple[int, int]
"""Ticket and attempt."""


class GroupTasks:
    """See the module.

    Args:
        tasks: Runs the tasks; an error that no other attempt cures ends it.

    Attributes:
        failures: Of groups, in a row.
    """

    def __init__(
        self,
        parts: ReplicaParts,
        settings: ReplicaSettings,
        lifecycle: Lifecycle,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._parts, self._settings = parts, settings
        self._lifecycle = lifecycle
        self._tasks = tasks
        self._in_flight: dict[Key, asyncio.Task[None]] = {}
        self.failures = FailureStreak(Cause.GROUPS_FAIL)

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def keys(self) -> list[Key]:
        """Ticket and attempt of each group in flight."""
        return list(self._in_flight)

    def begin(self, grant: LeaseGrant) -> None:
        """Generate the group that was granted."""
        task = self._tasks.create_task(self._run(grant))
        self._in_flight[grant.key] = task
        task.add_done_callback(lambda _: self._end(grant.key))
        self._lifecycle.on_change()

    def _end(self, key: Key) -> None:
        if self._lifecycle.state is not State.DRAINING:
            self._in_flight.pop(key, None)
        self._lifecycle.note_change()

    async def _run(self, grant: LeaseGrant) -> None:
        runner, buffer = self._parts.runner, self._parts.buffer
        try:
            if self._settings.records_turns:
                partial: Group | Journal | None = await self._open_journal(grant)
            else:
                partial = await self._fetch_partial(grant) if grant.partial_attempt else None
            group = await runner.run(grant, partial)
        except (EngineDied, RewardsFailed):
            raise  # the replica cannot go on
        except LeaseLost as error:
            self._lifecycle.counters["groups_lost"] += 1
            log.warning("group %d, attempt %d ended: %s", grant.ticket, grant.attempt, error)
            self._in_flight.pop(grant.key, None)
            return
        except AsyncrlError as error:
            if isinstance(error, Interrupted) and self._lifecycle.state is State.DRAINING:
                return  # nothing to hand back but the lease: the farewell does
            await self._fail(grant, error)
            return
        if not runner.is_complete(group):
            await self._push_partial(group)
            return
        try:
            fault_point("rollout.push", self._parts.engine.serving.step, grant.ticket)
            result = await self._lifecycle.repeat(lambda: buffer.push(group))
            self._lifecycle.counters[f"push/{result}"] += 1
            self.failures.succeed()
        except AsyncrlError as error:
            if not isinstance(error, DeadlineExceeded):  # the buffer is there, and refuses it
                self.failures.fail(str(error))
            await self._lifecycle.note("push_errors", error)
        self._in_flight.pop(grant.key, None)  # done: a drain must not release it

    async def _open_journal(self, grant: LeaseGrant) -> Journal:
        """Return the journal of the group's turns, with what earlier attempts recorded."""
        buffer, counters = self._parts.buffer, self._lifecycle.counters

        async def send(number: int, versions: tuple[int, int], record: bytes) -> str:
            result = await self._lifecycle.repeat(
                lambda: buffer.push_turns(*grant.key, number, versions, record)
            )
            counters[f"turns/{result}"] += 1
            return result

        past = None
        if grant.partial_attempt:  # without it, none may be added
            past = await self._lifecycle.repeat(lambda: buffer.fetch_partial(*grant.key))
            counters["groups_resumed"] += isinstance(past, list)
        return self._parts.runner.journal(*grant.key, send, past if isinstance(past, list) else ())

    async def _fetch_partial(self, grant: LeaseGrant) -> Group | None:
        """Return what an earlier attempt left. Without it, the group starts from its prompt."""
        buffer = self._parts.buffer
        try:
            partial = await self._lifecycle.repeat(lambda: buffer.fetch_partial(grant.ticket, grant.attempt))
        except AsyncrlError as error:
            await self._lifecycle.note("partials_unread", error)
            return None
        if not isinstance(partial, Group) or not self._parts.runner.fits(grant, partial):
            self._lifecycle.counters["partials_unfit"] += 1
            return None
        self._lifecycle.counters["groups_resumed"] += 1
        return partial

    async def _push_partial(self, group: Group) -> None:
        """Hand the beginning of a group back and end its lease; if that fails, the farewell ends it."""
        try:
            result = await self._parts.buffer.push_partial(group)
        except AsyncrlError as error:
            await self._lifecycle.note("partial_errors", error)
            return
        self._lifecycle.counters[f"partial/{result}"] += 1
        self._in_flight.pop((group.ticket, group.attempt), None)

    async def _fail(self, grant: LeaseGrant, error: AsyncrlError) -> None:
        buffer, is_unopened = self._parts.buffer, isinstance(error, NobodyCame)  # no attempt at the prompt
        self._lifecycle.counters["groups_unopened" if is_unopened else "groups_failed"] += 1
        if not (is_unopened or isinstance(error, RewardError)):  # the reward counts its own
            self.failures.fail(str(error))
        log.warning("group %d, attempt %d ended: %s", grant.ticket, grant.attempt, error)
        try:
            if is_unopened:
                await self._lifecycle.repeat(lambda: buffer.release([grant.key]))
            else:
                reason = f"{type(error).__name__}: {error.message}"
                cause = error.reason if isinstance(error, RewardError | EpisodeFailed) else ""
                await self._lifecycle.repeat(lambda: buffer.fail(grant.ticket, grant.attempt, reason, cause))
        except AsyncrlError as fail_error:
            await self._lifecycle.note("fail_errors", fail_error)
        self._in_flight.pop(grant.key, None)

    async def keep_leases(self) -> None:
        """Renew the leases of the groups in flight, and cancel the groups whose lease is lost."""
        while True:
            await asyncio.sleep(rules.renewal_interval_s(self._settings.lease_s))
            try:
                lost = await self._parts.buffer.renew(self.keys)
            except AsyncrlError as error:
                await self._lifecycle.note("renew_errors", error)
                continue
            for key in lost:
                if task := self._in_flight.get(key):
                    self._lifecycle.counters["groups_lost"] += 1
                    task.cancel()

    async def finish(self, grace_s: float) -> None:
        """Let groups finish within the grace of a drain, hand back the rest, or cancel it.

        Args:
            grace_s: Seconds that they may take.
        """
        tasks = list(self._in_flight.values())
        for stage, most_s in rules.plan_drain(grace_s, resumes_partial=self._settings.resumes_partial):
            unfinished = [task for task in tasks if not task.done()]
            if unfinished and (stage is DrainStage.FINISH or await self._interrupt(most_s)):
                await asyncio.wait(unfinished, timeout=most_s)
        for task in tasks:
            task.cancel()

    async def _interrupt(self, most_s: float) -> bool:
        try:
            await asyncio.wait_for(self._parts.engine.interrupt(), most_s)
        except (AsyncrlError, TimeoutError) as error:
            self._lifecycle.counters["interrupt_errors"] += 1
            log.warning("%s could not interrupt its requests: %s", self._lifecycle.name, error)
            return False
        return True

    async def release(self) -> None:
        """Give back the leases of what a drain has left unfinished.

        Raises:
            AsyncrlError: The buffer does not take them; they expire.
            TimeoutError: Nor does it answer in time.
        """
        if self._in_flight:
            await asyncio.wait_for(self._parts.buffer.release(self.keys), rules.FAREWELL_DEADLINE_S)

    def forget(self) -> None:
        """The replica has left: nothing is in flight."""
        self._in_flight.clear()
