"""What replicas and learners call: the buffer's operations with types.

Every method raises DeadlineExceeded when the buffer does not answer in time, and the buffer's own
error otherwise. A long poll (`lease`, `reserve`) returns empty-handed after `wait_s`; ask again. A
call whose answer was lost may be repeated: pushes, `reserve`, `trained` and `checkpointed` count once.
The learner's client repeats what was lost with its connection, so a buffer that is started again within
the deadline is a pause and no failure; a replica's caller does that itself.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from asyncrl.buffer.ledger.events import UNSAID
from asyncrl.buffer.payloads import Prefetched, read_fetched, split_frames
from asyncrl.errors import ConnectionLost, DeadlineExceeded, WireError
from asyncrl.experience import Group, decode_group, encode_group
from asyncrl.keys import ClientKeys
from asyncrl.metrics.tallies import Tally
from asyncrl.rpc import AsyncClient, Client, PendingCall

log = logging.getLogger(__name__)
T = TypeVar("T")

MARGIN_S = 5.0
"""What a long poll's answer may take beyond its wait."""
REPEAT_PAUSE_S = 0.05
FETCHED_AT_ONCE = 4
"""Groups per answer: the next ones travel while these are decoded."""
FETCHES_AT_ONCE = 32
"""Calls of one `fetch` in flight. A service drops replies beyond what it keeps for a client that is behind
(`rpc.sockets.UNSENT_REPLIES`)."""
PREFETCH_DEADLINE_S = 2.0
"""After that the next `fetch` asks for everything itself: the buffer may have died in between."""
MAX_PREFETCHED = 4096
"""What a service allows to be asked for in one `prefetch`."""


@dataclass(frozen=True)
class LeaseGrant:
    """The right to generate one group until `lease_s` from now; renew it in time.

    Attributes:
        source, pass_number, index: The prompt: `index` counts over all sources, one after the other;
            `pass_number` is the traversal of this source.
        seed: Of the ticket; `orders.sample_seed(run_seed, ticket, sample)` is a sample's own.
        carry_attempt: The attempt whose partial work `fetch_carry` returns, 0 for none.
    """

    ticket: int
    attempt: int
    source: int
    pass_number: int
    index: int
    seed: int
    lease_s: float
    carry_attempt: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """(ticket, attempt), as `renew` and `release` take it."""
        return self.ticket, self.attempt


@dataclass(frozen=True)
class EvaluationOrder:
    """Evaluate at the served weights, which have seen at least `step` steps.

    Attributes:
        part, num_parts: Which of the held-out prompts: every `num_parts`-th, from `part` on.
    """

    id: int
    step: int
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True)
class LeaseReply:
    """Grants, possibly none, and an evaluation order, mostly None."""

    grants: tuple[LeaseGrant, ...]
    evaluate: EvaluationOrder | None


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint that the ledger knows to be committed."""

    token: int
    step: int
    digest: str


@dataclass(frozen=True)
class Opening:
    """What a learner learns when it takes over.

    Attributes:
        checkpoints: From which it may resume, oldest first; without any, `resume(0)`.
        num_prompts: 0 while no replica has described the data.
        note: What the last `resume` with a note said.
    """

    token: int
    checkpoints: tuple[CheckpointEntry, ...]
    steps_trained: int
    num_prompts: int
    note: Mapping[str, float]


@dataclass(frozen=True)
class ReservedTicket:
    """One group of a reserved batch."""

    ticket: int
    attempt: int
    num_tokens: int
    num_bytes: int


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
        replica: The replica's name; call `retire` first if an earlier process had it.
        keys: Of the run, if its sockets have any (`asyncrl.keys`).
    """

    def __init__(
        self, address: str, replica: str, deadline_s: float = 30.0, keys: ClientKeys | None = None
    ) -> None:
        self.replica = replica
        self._rpc = AsyncClient(address, keys)
        self._deadline_s = deadline_s
        self._evaluating: int | None = None

    async def describe_data(
        self, num_prompts: int, digest: str, sources: Sequence[tuple[int, float]] = ()
    ) -> None:
        """Say what the training data is, once, before the first lease.

        Args:
            sources: (prompts, weight) of each source, where there are several.

        Raises:
            DataError: The run began with other data.
        """
        pairs = [list(one) for one in sources]
        await self._call("describe_data", num_prompts=num_prompts, digest=digest, sources=pairs)

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
        wanted: dict[str, Any] = {"version": version, "want": want, "evaluating": self._evaluating}
        if held is not None:
            wanted["held"] = [list(pair) for pair in held]
        args = await self._call("lease", wait_s, **wanted)
        grants = tuple(_read_grant(row) for row in args["grants"])
        order = args["evaluate"]
        if order is None or order["id"] == self._evaluating:
            return LeaseReply(grants, None)
        self._evaluating = order["id"]
        return LeaseReply(grants, EvaluationOrder(**order))

    async def renew(self, held: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Extend the leases of (ticket, attempt) pairs; return those that are lost: stop working on them.

        Also the replica's heartbeat: call it with no pairs while it evaluates.
        """
        args = await self._call("renew", tickets=[list(pair) for pair in held])
        return tuple((ticket, attempt) for ticket, attempt in args["lost"])

    async def push(self, group: Group) -> str:
        """Hand a finished group over; return `stored`, `duplicate`, `late` or `dropped` (constant rewards).

        Raises:
            WireError: The group is malformed; its attempt counts as failed.
        """
        frames = encode_group(group)
        reply = await self._rpc.call(
            "push",
            frames,
            self._deadline_s,
            replica=self.replica,
            ticket=group.ticket,
            attempt=group.attempt,
        )
        return str(reply.args["result"])

    async def carry(self, group: Group) -> str:
        """Return a lease with the work done so far, while draining; say what became of it.

        The next attempt at the ticket may go on from it. Returns `carried`, `released` (no room: the
        work is lost, the lease is returned) or `late`.

        Raises:
            WireError: The group is malformed; its attempt counts as failed.
        """
        reply = await self._rpc.call(
            "carry",
            encode_group(group),
            self._deadline_s,
            replica=self.replica,
            ticket=group.ticket,
            attempt=group.attempt,
        )
        return str(reply.args["result"])

    async def fetch_carry(self, ticket: int, attempt: int) -> Group | None:
        """Return the work that this leased attempt may go on from, or None: start from the prompt."""
        reply = await self._rpc.call(
            "fetch_carry", deadline_s=self._deadline_s, replica=self.replica, ticket=ticket, attempt=attempt
        )
        return decode_group(reply.frames) if reply.args["found"] else None

    async def fail(self, ticket: int, attempt: int, reason: str) -> None:
        """Report a group that could not be generated; it is tried again, or given up."""
        await self._call("fail", ticket=ticket, attempt=attempt, reason=reason)

    async def release(self, held: Iterable[tuple[int, int]]) -> None:
        """Return leases unfinished, while draining."""
        await self._call("release", tickets=[list(pair) for pair in held])

    async def retire(self) -> None:
        """Return all that this replica's name holds."""
        await self._call("retire")

    async def evaluated(
        self, order: EvaluationOrder, version: int, metrics: Mapping[str, float | Tally]
    ) -> EvaluationOrder | None:
        """Report the result of a part at weights of `version`; return another part to answer, if any."""
        values = {name: list(value) if isinstance(value, Tally) else value for name, value in metrics.items()}
        args = await self._call("evaluated", id=order.id, part=order.part, version=version, metrics=values)
        if args["more"] is not None:
            return EvaluationOrder(**args["more"])
        if self._evaluating == order.id:
            self._evaluating = None
        return None

    def forget_evaluation(self) -> None:
        """Give up the evaluation order that is held; a later `lease` may get it again."""
        self._evaluating = None

    async def status(self) -> dict[str, Any]:
        """Return the buffer's census, counters and evaluations."""
        return await self._call("status")

    def close(self) -> None:
        self._rpc.close()

    async def _call(self, op: str, wait_s: float | None = None, **args: Any) -> dict[str, Any]:
        deadline_s = self._deadline_s
        if wait_s is not None:
            deadline_s, args["wait_s"] = wait_s + MARGIN_S, wait_s
        reply = await self._rpc.call(op, deadline_s=deadline_s, replica=self.replica, **args)
        return reply.args


def _read_grant(row: dict[str, Any]) -> LeaseGrant:
    prompt = (row["source"], row["pass"], row["index"], row["seed"])
    return LeaseGrant(row["ticket"], row["attempt"], *prompt, row["lease_s"], row["carry_attempt"])


def _read_reservation(step: int, args: dict[str, Any]) -> Reservation | None:
    if not args["ready"]:
        return None
    tickets = tuple(ReservedTicket(**row) for row in args["tickets"])
    return Reservation(step, tickets, dict(args["versions"]), args["whole"])


class LearnerClient:
    """A learner's side, synchronous. `open` or a given token comes first.

    Args:
        token: The fencing token that another process of the same learner got from `open`; a
            data-parallel rank is built with it, only fetches, and may not change the ledger.
        deadline_s: Of each call, its repetitions included. A long poll has its own.

    Attributes:
        num_repeated: Calls that were made again because the connection broke.
    """

    def __init__(
        self, address: str, token: int = 0, deadline_s: float = 30.0, keys: ClientKeys | None = None
    ) -> None:
        self.token = token
        self._rpc = Client(address, keys)
        self._deadline_s = deadline_s
        self._prefetching: PendingCall | None = None
        self.num_repeated = 0

    def open(self, holder: str) -> Opening:
        """Become the learner: older tokens are fenced. Then `resume`, unless nothing was trained yet."""
        args = self._repeat(lambda left_s: self._rpc.call("open", deadline_s=left_s, holder=holder)).args
        self.token = args["token"]
        checkpoints = tuple(CheckpointEntry(**row) for row in args["checkpoints"])
        return Opening(self.token, checkpoints, args["steps_trained"], args["num_prompts"], args["note"])

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
        self._call("resume", step=step, is_fork=is_fork, note=dict(note or {}), refused=list(refused))

    def register_version(self, step: int) -> int:
        """Return a new version number for the weights after `step` steps."""
        return int(self._call("register_version", step=step)["number"])

    def reserve(
        self, step: int, wait_s: float, have: list[int] | None = None, at_least: int = 1
    ) -> Reservation | None:
        """Return the batch of `step`, or None if it is not complete within `wait_s`; with `have`, the tickets
        of the parts before, its next part: what is complete, `at_least` so many groups if not the last.
        """
        return _read_reservation(step, self._call("reserve", wait_s, step=step, have=have, at_least=at_least))

    def prefetch(self, num_groups: int) -> None:
        """Ask for the payloads of the oldest complete groups, without waiting: they travel meanwhile.

        The next `fetch` takes those of them that it is asked for. Nothing is reserved by this.
        """
        if self._prefetching is not None:
            self._rpc.forget(self._prefetching)
            self._prefetching = None
        with contextlib.suppress(DeadlineExceeded):  # no buffer: a hint must never fail a step
            self._prefetching = self._rpc.begin(
                "prefetch",
                deadline_s=min(self._deadline_s, PREFETCH_DEADLINE_S),
                token=self.token,
                num_groups=min(num_groups, MAX_PREFETCHED),
            )

    def fetch(self, tickets: Sequence[int], prefetch: int = 0) -> list[Group]:
        """Return the groups of reserved tickets, in the order asked for.

        Args:
            prefetch: How many groups of the next batch to ask for before these are decoded, see `prefetch`.

        Raises:
            LedgerError: A payload turned out damaged; its ticket was issued again. Reserve the step again.
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
                groups |= read_fetched(part, call.end(), groups)
                begun.popleft()
        finally:
            for _, call in begun:
                self._rpc.forget(call)
        return [groups[number] for number in tickets]

    def _begin_fetch(
        self, part: list[int], known: Mapping[int, Prefetched], deadline_s: float
    ) -> tuple[list[int], PendingCall]:
        have = [[ticket, known[ticket].attempt] for ticket in part if ticket in known]
        wanted: dict[str, Any] = {"token": self.token, "tickets": part, "have": have}
        return part, self._rpc.begin("fetch", deadline_s=deadline_s, **wanted)

    def _take_prefetched(self) -> dict[int, Prefetched]:
        """Return what the last `prefetch` brought, by ticket; nothing if it came too late."""
        call, self._prefetching = self._prefetching, None
        if call is None:
            return {}
        try:
            reply = call.end()
        except (DeadlineExceeded, WireError):  # a hint must never fail a step
            return {}
        pairs = zip(reply.args["groups"], split_frames(reply), strict=True)
        return {ticket: Prefetched(attempt, frames) for (ticket, attempt), frames in pairs}

    def trained(self, step: int, dropped: Iterable[tuple[int, str]] = (), lag_max: int = UNSAID) -> None:
        """Report step `step` trained, less the dropped (ticket, reason) pairs (`stale`, `guard`).

        Args:
            lag_max: The largest lag of a token that entered the loss.

        Raises:
            LedgerError: `lag_max` is over the bound.
        """
        self._call("trained", step=step, dropped=[list(pair) for pair in dropped], lag_max=lag_max)

    def trained_then_reserve(
        self, step: int, wait_s: float, dropped: Iterable[tuple[int, str]] = (), lag_max: int = UNSAID
    ) -> Reservation | None:
        """Call `trained(step)` and `reserve(step + 1)` in one round trip.

        Raises:
            LedgerError: As `trained`; what was then reserved stays so.
        """
        drops = [list(pair) for pair in dropped]
        report: dict[str, Any] = {"token": self.token, "step": step, "dropped": drops, "lag_max": lag_max}
        wanted: dict[str, Any] = {"token": self.token, "step": step + 1, "wait_s": wait_s}
        told = self._rpc.begin("trained", deadline_s=self._deadline_s, **report)
        asked = self._rpc.begin("reserve", deadline_s=wait_s + MARGIN_S, **wanted)
        try:
            told.end()
            return _read_reservation(step + 1, asked.end().args)
        finally:
            self._rpc.forget(asked)

    def checkpointed(self, step: int, digest: str, kept: Sequence[int]) -> None:
        """Commit a checkpoint of the weights after `step` steps; `kept`: all that exist, this one too."""
        self._call("checkpointed", step=step, digest=digest, kept=list(kept))

    def request_evaluation(self, step: int) -> int:
        """Order an evaluation at weights of at least `step`; return its id. Results stand in `status`."""
        return int(self._call("request_evaluation", step=step)["id"])

    def status(self) -> dict[str, Any]:
        """Return the buffer's census, counters and evaluations."""
        return self._repeat(lambda left_s: self._rpc.call("status", deadline_s=left_s)).args

    def close(self) -> None:
        self._rpc.close()

    def _call(self, op: str, wait_s: float | None = None, **args: Any) -> dict[str, Any]:
        if wait_s is not None:  # whoever polls asks again
            args["wait_s"] = wait_s
            return self._rpc.call(op, deadline_s=wait_s + MARGIN_S, token=self.token, **args).args
        call = partial(self._rpc.call, op, token=self.token, **args)
        return self._repeat(lambda left_s: call(deadline_s=left_s)).args

    def _repeat(self, call: Callable[[float], T]) -> T:
        """Make a call, given the seconds that it may take; make it again if the connection breaks."""
        end = time.monotonic() + self._deadline_s
        while True:
            try:
                return call(max(0.0, end - time.monotonic()))
            except ConnectionLost as error:
                if time.monotonic() >= end:
                    raise
                self.num_repeated += 1
                log.warning("%s; it is made again", error.message)
                time.sleep(REPEAT_PAUSE_S)
