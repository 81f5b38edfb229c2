"""Transfer executor: sends or receives the buckets of a round in its own thread, over a cached group.

Owns the cached transports of one peer, one per membership, and the threads that use them, or that check a
mapped copy. A thread that hangs holds its buffers until its operation's deadline and is never waited for.
The transfer thread
  consumes: one transfer order    waits for: the other members, until the order's deadline; the next bucket
                                  travels already while one is waited for
  unblocked by: buckets, an error, the deadline    produces: checks, one call of `done`
The checking thread of a transfer
  consumes: checks of buckets that have arrived, while later ones travel   waits for: the next check
  unblocked by: the same, the end of the transfer                          produces: mismatches
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.runtime.interface import Queue, Runtime
from asyncrl.core.staleness import UNLOADED
from weight_sync.backends.contract import Broadcast, DigestMismatch, Group, Transport
from weight_sync.backends.store import StoreError
from weight_sync.encoding.delta_codec import CarryBucket, carry_whole
from weight_sync.protocol.messages import MAX_TEXT, Transfer
from weight_sync.protocol.rounds import DIGEST, STORE, TRANSPORT

MAX_UNDER_WAY = 2
"""Broadcasts of one transfer: with two, 100 and 400 MB reach one receiver at 0.85 and 0.86 of bare gloo's
rate, with one at 0.82 and 0.84 (medians of three runs on two cores)."""


@dataclass(frozen=True)
class TransferOrder:
    """A transfer as the coordinator orders it.

    Attributes:
        base: The version number that every receiver of the round holds, so that differences to it may be
            sent; 0 if whole buckets are to be.
        is_afresh: Store again what is stored already: a receiver could not use it.
        sources: As in `protocol.messages.Transfer`.
    """

    round: int
    number: int
    group: Group
    live: frozenset[int]
    deadline_s: float
    base: int = UNLOADED
    is_afresh: bool = False
    sources: int = 0

    @staticmethod
    def of(told: Transfer) -> TransferOrder:
        """Return the order that a peer was told."""
        group = Group(told.membership, told.rank, told.world, told.store_host, told.store_port, told.folder)
        live, deadline_s = frozenset(told.live), told.deadline_s
        how = (told.base, told.afresh, told.sources)
        return TransferOrder(told.round, told.number, group, live, deadline_s, *how)


MakeTransport = Callable[[Group], Transport]
"""Makes the transport of a membership."""
Check = Callable[[], None]
"""Raises DigestMismatch if a bucket is not what it should be."""
AfterBucket = Callable[[int, torch.Tensor], Check | None]
"""Called on the transfer thread; the check that it returns runs while the next bucket travels."""
Done = Callable[[TransferOrder, str, str], None]
"""Called on the transfer thread with the order, the cause of a failure (or "") and its message."""


class TransferExecutor:
    """See the module; all methods are called by one thread, the service's."""

    def __init__(self, runtime: Runtime, make_transport: MakeTransport) -> None:
        self._runtime = runtime
        self._make_transport = make_transport
        self._transports: dict[int, Transport] = {}

    def carry(
        self,
        order: TransferOrder,
        buckets: Sequence[torch.Tensor],
        after_bucket: AfterBucket,
        done: Done,
        carry_bucket: CarryBucket = carry_whole,
    ) -> None:
        """Start to send or receive `buckets`; `after_bucket` is called after each, `done` at the end."""
        self._close_unused(order.live)
        until = self._runtime.now() + order.deadline_s
        transport = self._transports.get(order.group.membership)
        is_new = transport is None
        if transport is None:
            transport = self._transports[order.group.membership] = self._make_transport(order.group)

        def work() -> None:
            cause, message = "", ""
            try:
                if is_new:
                    transport.form(order.group, until)
                _carry_all(self._runtime, transport, buckets, carry_bucket, after_bucket, until)
            except DigestMismatch as error:
                cause, message = DIGEST, str(error)
            except StoreError as error:
                cause, message = f"{STORE}: {error.message}"[:MAX_TEXT], error.message
            except Exception as error:  # of any kind: whoever waits for this round must hear of its end
                transport.close()  # the sockets close with it, which wakes the other members
                cause, message = TRANSPORT, str(error)
            done(order, cause, message)

        self._runtime.spawn(f"transfer-{order.round}", work)

    def check(
        self,
        round_id: int,
        buckets: Sequence[torch.Tensor],
        after_bucket: AfterBucket,
        done: Callable[[str, str], None],
    ) -> None:
        """Start to check `buckets` that are here already; `done` is called with cause and message."""

        def work() -> None:
            cause, message = "", ""
            try:
                for index, bucket in enumerate(buckets):
                    if (check := after_bucket(index, bucket)) is not None:
                        check()
            except Exception as error:  # of any kind: whoever waits for this round must hear of its end
                cause, message = DIGEST, str(error)
            done(cause, message)

        self._runtime.spawn(f"map-{round_id}", work)

    def abort(self, membership: int) -> None:
        """Give up the membership's transfer, as far as its transport can."""
        transport = self._transports.pop(membership, None)
        if transport is not None:
            transport.abort()
            transport.close()

    def close(self) -> None:
        """Give up what is going on, and free all groups."""
        for membership in list(self._transports):
            self.abort(membership)

    def _close_unused(self, live: frozenset[int]) -> None:
        for membership in set(self._transports) - live:
            with contextlib.suppress(RuntimeError):  # a broken group may fail to close; it is dropped anyway
                self._transports.pop(membership).close()


class _Checks:
    """Runs checks one after another in a thread of its own, which starts with the first one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._checks: Queue[Check | None] = runtime.queue()
        self._has_ended = runtime.event()
        self._has_begun = self._is_given_up = False
        self._error: Exception | None = None

    def __enter__(self) -> _Checks:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_given_up = True
        self._checks.put(None)

    def add(self, check: Check | None) -> None:
        if check is None:
            return
        if not self._has_begun:
            self._has_begun = True
            self._runtime.spawn("check", self._work)
        self._checks.put(check)

    def _work(self) -> None:
        while (check := self._checks.get()) is not None and not self._is_given_up:
            try:
                check()
            except Exception as error:  # of any kind: who waits for the checks raises it
                self._error = self._error or error
        self._has_ended.set()

    def finish(self, until: float) -> None:
        """Wait for all checks and raise what the first that failed has raised."""
        self._checks.put(None)
        if self._has_begun and not self._has_ended.wait(max(0.0, until - self._runtime.now())):
            raise DeadlineExceeded("the buckets were not verified in time")
        if self._error is not None:
            raise self._error


class _UnderWay:
    """Broadcasts that were started, in order. None of them is left behind when the transfer fails."""

    def __init__(self) -> None:
        self._started: deque[tuple[int, Broadcast]] = deque()

    def __enter__(self) -> _UnderWay:
        return self

    def __exit__(self, *_: object) -> None:
        for _index, broadcast in self._started:
            with contextlib.suppress(SyncError, DeadlineExceeded):  # the first failure is told
                broadcast.wait()

    def __len__(self) -> int:
        return len(self._started)

    def add(self, index: int, broadcast: Broadcast) -> None:
        self._started.append((index, broadcast))

    def wait_for_first(self) -> int:
        """Return the index of the bucket that has arrived."""
        index, broadcast = self._started.popleft()
        broadcast.wait()
        return index


def _carry_all(
    runtime: Runtime,
    transport: Transport,
    buckets: Sequence[torch.Tensor],
    carry_bucket: CarryBucket,
    after_bucket: AfterBucket,
    until: float,
) -> None:
    """Carry every bucket; a mismatch is raised at the end, so that the group stays in step."""
    with _Checks(runtime) as checks, _UnderWay() as under_way:
        for index, bucket in enumerate(buckets):
            under_way.add(index, carry_bucket(transport, index, bucket, until))
            if len(under_way) == MAX_UNDER_WAY:
                checks.add(_end_first(under_way, buckets, after_bucket))
        while len(under_way):
            checks.add(_end_first(under_way, buckets, after_bucket))
        checks.finish(until)


def _end_first(
    under_way: _UnderWay, buckets: Sequence[torch.Tensor], after_bucket: AfterBucket
) -> Check | None:
    index = under_way.wait_for_first()
    return after_bucket(index, buckets[index])
