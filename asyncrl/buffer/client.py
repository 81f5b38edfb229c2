"""Typed clients of the buffer for replicas and learners.

Every method raises DeadlineExceeded when the buffer does not answer in time, WireError when its answer is
none to the call, and the buffer's own error otherwise. A long poll (`lease`, `reserve`) returns
empty-handed after `wait_s`; ask again. A call whose answer was lost may be repeated: pushes, `reserve`,
`trained` and `checkpointed` count once. `LearnerClient` repeats the calls that were lost with its connection,
so a buffer that is started again within the deadline is a pause and no failure; the caller of
`ReplicaClient` repeats its calls itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.buffer import messages as wire
from asyncrl.buffer.ledger.events import UNSAID
from asyncrl.buffer.messages import (
    EvaluationOrder,
    Fetched,
    LeaseReply,
    Opening,
    PrefetchedGroups,
    ReservedTicket,
)
from asyncrl.buffer.rules.replica import HeldOrder
from asyncrl.core.errors import ConnectionLost, DeadlineExceeded, LedgerError, WireError
from asyncrl.core.experience import Group, decode_group, encode_group
from asyncrl.core.metrics.tallies import Tally
from asyncrl.core.rpc import AsyncClient, Client, PendingCall
from asyncrl.core.rpc.message import A, Answer, AskStatus, Operation, Q
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.sockets.keys import ClientKeys
from asyncrl.core.status.service import BufferStatus
from asyncrl.core.wire import Frame

log = logging.getLogger(__name__)
T = TypeVar("T")

MARGIN_S = 5.0
"""Time that a long poll's answer may take beyond its wait."""
REPEAT_PAUSE_S = 0.05
FETCHED_AT_ONCE = 4
"""Groups per answer: the next ones travel while these are decoded."""
FETCHES_AT_ONCE = 32
"""Calls of one `fetch` in flight. A service drops replies beyond what it keeps for a client that is behind
(`asyncrl.core.sockets.options.UNSENT_REPLIES`)."""
PREFETCH_DEADLINE_S = 2.0
"""After that the next `fetch` asks for everything itself: the buffer may have died in between."""


@dataclass(frozen=True)
class Reservation:
    """A batch, sorted by ticket.

    Attributes:
        step_of_version: For every version number in the batch, the step to subtract for a token's
            lag. It is below the version's own step for tokens of a branch that a resume abandoned.
        is_whole: Whether this, with what the learner had before, is all of the step.
    """

    step: int
    tickets: tuple[ReservedTicket, ...]
    step_of_version: Mapping[int, int]
    is_whole: bool = True


class ReplicaClient:
    """A replica's side. Up to 250 calls may be in flight in one event loop.

    Args:
        address: Of the buffer.
        replica: The replica's name; call `deregister` first if an earlier process had it.
        keys: Of the run, if its sockets have any (`asyncrl.core.sockets.keys`).
        runtime: Of the process; a program of its own needs none.
    """

    def __init__(
        self,
        address: str,
        replica: str,
        deadline_s: float = 30.0,
        keys: ClientKeys | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.replica = replica
        self._rpc = AsyncClient(runtime or ThreadRuntime(), address, keys)
        self._deadline_s = deadline_s
        self._order = HeldOrder()

    async def describe_data(
        self, num_prompts: int, digest: str, sources: Sequence[tuple[int, float]] = ()
    ) -> None:
        """Describe the training data, once, before the first lease.

        Args:
            sources: (prompts, weight) of each source, where there are several.

        Raises:
            DataError: The run began with other data.
        """
        described = wire.DescribeData(num_prompts, digest, tuple(sources))
        await self._ask(wire.DESCRIBE_DATA, described)

    async def lease(
        self, version: int, want: int, wait_s: float, held: Iterable[tuple[int, int]] | None = None
    ) -> LeaseReply:
        """Ask for up to `want` groups to generate with the weights of `version`.

        `want=0` asks for an evaluation order only. An order is handed out once: it is this replica's
        until `evaluated`.

        Args:
            held: All (ticket, attempt) pairs that this replica works on, after a `lease` failed: grants
                may have been lost with its answer, and go back. Not while another `lease` is out.
        """
        held = None if held is None else tuple(held)
        asked = wire.Lease(self.replica, version, want, wait_s, self._order.number, held)
        reply = (await self._ask(wire.LEASE, asked, deadline_s=wait_s + MARGIN_S)).message
        is_new = reply.evaluate is not None and self._order.take(reply.evaluate.id)
        return reply if is_new else LeaseReply(reply.grants)

    async def renew(self, held: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Extend the leases of (ticket, attempt) pairs; return those that are lost: stop working on them.

        Also the replica's heartbeat: call it with no pairs while it evaluates.
        """
        return (await self._ask(wire.RENEW, wire.Renew(self.replica, tuple(held)))).message.lost

    async def push(self, group: Group) -> str:
        """Hand a finished group over; return `stored`, `duplicate`, `late` or `dropped` (constant rewards).

        Raises:
            WireError: The group is malformed; its attempt counts as failed.
        """
        asked = wire.Push(self.replica, group.ticket, group.attempt)
        return (await self._ask(wire.PUSH, asked, encode_group(group))).message.result

    async def push_partial(self, group: Group) -> str:
        """Return a lease with the work done so far, while draining; return its fate.

        The next attempt at the ticket may go on from it. Returns `stored`, `released` (no room: the
        work is lost, the lease is returned) or `late`.

        Raises:
            WireError: The group is malformed; its attempt counts as failed.
        """
        asked = wire.PushPartial(self.replica, group.ticket, group.attempt)
        return (await self._ask(wire.PUSH_PARTIAL, asked, encode_group(group))).message.result

    async def push_turns(
        self, ticket: int, attempt: int, number: int, versions: tuple[int, int], record: bytes
    ) -> str:
        """Add a record of finished turns to those that `fetch_partial` returns to later attempts.

        Args:
            number: From 1, over all attempts. versions: The lowest and highest that sampled its tokens.

        Returns:
            `stored`, `duplicate` (it was before), `full` (no room: nothing is kept) or `late`.
        """
        asked = wire.PushTurns(self.replica, ticket, attempt, number, versions)
        return (await self._ask(wire.PUSH_TURNS, asked, [record])).message.result

    async def fetch_partial(self, ticket: int, attempt: int) -> Group | list[Frame] | None:
        """Return what this leased attempt may go on from: a group, or records of turns; None for nothing."""
        found = await self._ask(wire.FETCH_PARTIAL, wire.FetchPartial(self.replica, ticket, attempt))
        if found.message.num_records:
            return list(found.frames)
        return decode_group(found.frames) if found.message.found else None

    async def fail(self, ticket: int, attempt: int, reason: str, cause: str = "") -> None:
        """Report a group that could not be generated; it is tried again, or given up. See `Fail`."""
        await self._ask(wire.FAIL, wire.Fail(self.replica, ticket, attempt, reason, cause))

    async def release(self, held: Iterable[tuple[int, int]]) -> None:
        """Return leases unfinished, while draining."""
        await self._ask(wire.RELEASE, wire.Release(self.replica, tuple(held)))

    async def deregister(self) -> None:
        """Return all that this replica's name holds."""
        await self._ask(wire.DEREGISTER, wire.Deregister(self.replica))

    async def evaluated(
        self, order: EvaluationOrder, version: int, metrics: Mapping[str, float | Tally]
    ) -> EvaluationOrder | None:
        """Report the result of a part at weights of `version`; return another part to answer, if any."""
        report = wire.Evaluated(self.replica, order.id, version, metrics, order.part)
        more = (await self._ask(wire.EVALUATED, report)).message.more
        self._order.end(order.id, has_more=more is not None)
        return more

    def forget_evaluation(self) -> None:
        """Give up the evaluation order that is held; a later `lease` may get it again."""
        self._order.forget()

    async def status(self) -> BufferStatus:
        """Return the buffer's census, counters and evaluations."""
        return (await self._ask(wire.STATUS, AskStatus())).message

    def close(self) -> None:
        self._rpc.close()

    async def _ask(
        self,
        operation: Operation[Q, A],
        asked: Q,
        frames: Sequence[Frame] = (),
        deadline_s: float | None = None,
    ) -> Answer[A]:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        return await self._rpc.ask(operation, asked, frames, deadline_s)


def _read_reservation(step: int, found: wire.Reserved) -> Reservation | None:
    return Reservation(step, found.tickets, dict(found.versions), found.whole) if found.ready else None


class LearnerClient:
    """A learner's side, synchronous. `open` or a given token comes first.

    Args:
        token: The fencing token that another process of the same learner got from `open`; a
            data-parallel rank is built with it, only fetches, and may not change the ledger.
        deadline_s: Of each call, its repetitions included. A long poll has its own.
        runtime: Of the process; a program of its own needs none.

    Attributes:
        num_repeated: Calls that were made again because the connection broke.
    """

    def __init__(
        self,
        address: str,
        token: int = 0,
        deadline_s: float = 30.0,
        keys: ClientKeys | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.token = token
        self._runtime = runtime or ThreadRuntime()
        self._rpc = Client(self._runtime, address, keys)
        self._deadline_s = deadline_s
        self._prefetching: PendingCall | None = None
        self._reserving: tuple[wire.Reserve, PendingCall] | None = None
        self.num_repeated = 0

    def open(self, holder: str) -> Opening:
        """Become the learner: older tokens are fenced. Then `resume`, unless nothing was trained yet."""
        opening = self._ask(wire.OPEN, wire.Open(holder))
        self.token = opening.token
        return opening

    def resume(
        self,
        step: int,
        *,
        is_fork: bool = False,
        note: Mapping[str, float] | None = None,
        refused: Sequence[int] = (),
    ) -> None:
        """Rewind the ledger to the loaded checkpoint's step (0: initial weights).

        Args:
            is_fork: Training goes on otherwise than before: later steps will have other weights.
            note: A few numbers that `open` tells the next learner; without any, the last note stays.
            refused: Reserved or trained tickets of `step` or later to drop as `guard`.

        Raises:
            LedgerError: No committed checkpoint has this step, or a refused ticket is not of it or later.
        """
        asked = wire.Resume(self.token, step, is_fork, dict(note or {}), tuple(refused))
        self._ask(wire.RESUME, asked)

    def register_version(self, step: int) -> int:
        """Return a new version number for the weights after `step` steps."""
        return self._ask(wire.REGISTER_VERSION, wire.RegisterVersion(self.token, step)).number

    def reserve(
        self,
        step: int,
        wait_s: float,
        have: list[int] | None = None,
        at_least: int = 1,
        until: PendingCall | None = None,
    ) -> Reservation | None:
        """Return the batch of `step`, or None if it is not complete within `wait_s`; with `have`, the tickets
        of the parts before, its next part: what is complete, `at_least` so many groups if not the last.

        Args:
            until: A call of another client. If it is over first, None is returned, and the next `reserve` of
                the same takes the buffer's answer.
        """
        asked = wire.Reserve(self.token, step, wait_s, None if have is None else tuple(have), at_least)
        call = self._begin_reserving(asked)
        if until is not None:
            self._rpc.await_either(call, until)
            if not call.is_over():
                self._reserving = asked, call
                return None
        return _read_reservation(step, wire.RESERVE.read(call.end()).message)

    def _begin_reserving(self, asked: wire.Reserve) -> PendingCall:
        """Return the call that was left for a wait, if it is the same one, or begin it."""
        before, self._reserving = self._reserving, None
        if before is not None and before[0] == asked:
            return before[1]
        if before is not None:
            self._rpc.forget(before[1])
        return self._rpc.begin_asking(wire.RESERVE, asked, asked.wait_s + MARGIN_S)

    def prefetch(self, num_groups: int) -> None:
        """Ask for the payloads of the oldest complete groups, without waiting: they travel meanwhile.

        The next `fetch` takes those of them that it is asked for. Nothing is reserved by this.
        """
        if self._prefetching is not None:
            self._rpc.forget(self._prefetching)
            self._prefetching = None
        with contextlib.suppress(DeadlineExceeded):  # no buffer: a hint must never fail a step
            asked = wire.Prefetch(self.token, min(num_groups, wire.MAX_PREFETCHED))
            deadline_s = min(self._deadline_s, PREFETCH_DEADLINE_S)
            self._prefetching = self._rpc.begin_asking(wire.PREFETCH, asked, deadline_s)

    def fetch(self, tickets: Sequence[int], prefetch: int = 0) -> list[Group]:
        """Return the groups of reserved tickets, in the order asked for.

        Args:
            prefetch: Number of groups of the next batch to request before these are decoded, see `prefetch`.

        Raises:
            LedgerError: A payload is damaged; its ticket was issued again. Reserve the step again.
        """
        known = self._take_prefetched()
        return self._repeat(lambda left_s: self._fetch(tickets, prefetch, known, left_s))

    def _fetch(
        self, tickets: Sequence[int], prefetch: int, known: Mapping[int, Prefetched], deadline_s: float
    ) -> list[Group]:
        firsts = range(0, max(1, len(tickets)), FETCHED_AT_ONCE)
        waiting = deque(list(tickets[first : first + FETCHED_AT_ONCE]) for first in firsts)
        begun: deque[tuple[list[int], PendingCall]] = deque()
        groups: dict[int, Group] = {}
        try:
            while waiting or begun:
                while waiting and len(begun) < FETCHES_AT_ONCE:
                    begun.append(self._begin_fetch(waiting.popleft(), known, deadline_s))
                if prefetch and not waiting:
                    self.prefetch(prefetch)
                    prefetch = 0
                if not groups:  # while the answers travel
                    groups = {one: decode_group(known[one].frames) for one in tickets if one in known}
                part, call = begun[0]
                groups |= read_fetched(part, wire.FETCH.read(call.end()), groups)
                begun.popleft()
        finally:
            for _, call in begun:
                self._rpc.forget(call)
        return [groups[number] for number in tickets]

    def _begin_fetch(
        self, part: list[int], known: Mapping[int, Prefetched], deadline_s: float
    ) -> tuple[list[int], PendingCall]:
        have = tuple((ticket, known[ticket].attempt) for ticket in part if ticket in known)
        asked = wire.Fetch(self.token, tuple(part), have)
        return part, self._rpc.begin_asking(wire.FETCH, asked, deadline_s)

    def _take_prefetched(self) -> dict[int, Prefetched]:
        """Return the payloads of the last `prefetch`, by ticket; none if it came too late."""
        call, self._prefetching = self._prefetching, None
        if call is None:
            return {}
        try:
            found = wire.PREFETCH.read(call.end())
        except (DeadlineExceeded, WireError):  # a hint must never fail a step
            return {}
        pairs = zip(found.message.groups, split_frames(found), strict=True)
        return {ticket: Prefetched(attempt, frames) for (ticket, attempt), frames in pairs}

    def trained(self, step: int, dropped: Iterable[tuple[int, str]] = (), lag_max: int = UNSAID) -> None:
        """Report step `step` trained, less the dropped (ticket, reason) pairs (`stale`, `guard`).

        Args:
            lag_max: The largest lag of a token that entered the loss.

        Raises:
            LedgerError: `lag_max` is over the bound.
        """
        self._ask(wire.TRAINED, wire.Trained(self.token, step, tuple(dropped), lag_max))

    def checkpointed(self, step: int, digest: str, kept: Sequence[int]) -> None:
        """Commit a checkpoint of the weights after `step` steps; `kept`: all that exist, this one too."""
        self._ask(wire.CHECKPOINTED, wire.Checkpointed(self.token, step, digest, tuple(kept)))

    def request_evaluation(self, step: int) -> int:
        """Order an evaluation at weights of at least `step`; return its id. Results stand in `status`."""
        return self._ask(wire.REQUEST_EVALUATION, wire.RequestEvaluation(self.token, step)).id

    def status(self) -> BufferStatus:
        """Return the buffer's census, counters and evaluations."""
        return self._ask(wire.STATUS, AskStatus())

    def close(self) -> None:
        self._rpc.close()

    def _ask(self, operation: Operation[Q, A], asked: Q) -> A:
        return self._repeat(lambda left_s: self._rpc.ask(operation, asked, (), left_s).message)

    def _repeat(self, call: Callable[[float], T]) -> T:
        """Make a call, given the seconds that it may take; make it again if the connection breaks."""
        end = self._runtime.now() + self._deadline_s
        while True:
            try:
                return call(max(0.0, end - self._runtime.now()))
            except ConnectionLost as error:
                if self._runtime.now() >= end:
                    raise
                self.num_repeated += 1
                log.warning("%s; it is made again", error.message)
                self._runtime.sleep(REPEAT_PAUSE_S)


def split_frames(answer: Answer[Fetched] | Answer[PrefetchedGroups]) -> list[list[Frame]]:
    """Return the frames of each group in an answer to `fetch` or `prefetch`."""
    counts = answer.message.frames_per_group
    if sum(counts) != len(answer.frames):
        raise WireError("the buffer's frames do not fit the groups that it names")
    frames = iter(answer.frames)
    return [[next(frames) for _ in range(count)] for count in counts]


def read_fetched(
    tickets: Sequence[int], answer: Answer[Fetched], known: Mapping[int, Group]
) -> dict[int, Group]:
    """Return the groups that came; those of `tickets` without frames must be `known`."""
    if lost := answer.message.lost:
        raise LedgerError(f"the payloads of tickets {list(lost)} are lost", hint="Reserve the step again")
    found = split_frames(answer)
    if len(found) != len(tickets):
        raise WireError("the buffer's frames do not fit the tickets that were fetched")
    came = {ticket: frames for ticket, frames in zip(tickets, found, strict=True) if frames}
    if any(ticket not in came and ticket not in known for ticket in tickets):
        raise WireError("the buffer left out groups that were fetched")
    return {ticket: decode_group(frames) for ticket, frames in came.items()}


@dataclass(frozen=True)
class Prefetched:
    """A payload that came ahead, of one attempt at a ticket."""

    attempt: int
    frames: list[Frame]
