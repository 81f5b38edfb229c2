"""The publisher service, on a node of the learner: keeps its stripe of the newest version and sends it.

Owns the segments, the store where groups meet, and the sending side of each group. Receivers of its node map
a version where it is. Never makes the learner wait for a replica: a commit ends as soon as the version is
current. The server's thread
  consumes: the learner's calls, orders, ends of transfers   waits for: the same
  unblocked by: the same                                     produces: `published`, `sent`, `send_failed`
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from asyncrl.core.errors import SyncError, WireError
from asyncrl.core.rpc import Request, Server
from asyncrl.core.rpc.message import Answer, Done, Message
from asyncrl.core.rpc.operations import Operations, send_answer
from asyncrl.core.runtime.clock import Clock
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.service_command import AnyCommand, unknown_command
from asyncrl.core.sockets.keys import RunKeys
from asyncrl.core.staleness import UNLOADED
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import PublisherStatus
from weight_sync import messages as wire
from weight_sync.backends.folder import Shelf
from weight_sync.bounds import limits_of
from weight_sync.coordinator_session import CoordinatorSession, Introduction, Reset
from weight_sync.direct.desk import Desk
from weight_sync.encoding.choice import choose_widths
from weight_sync.encoding.delta_codec import CarryBucket, DeltaNames, DeltaSender, carry_whole
from weight_sync.memory.manifest import ANY_VERSION, Manifest, VersionBounds
from weight_sync.memory.pool import SegmentPool, Slot
from weight_sync.protocol import messages as told
from weight_sync.protocol.lanes.stripes import WHOLE, Stripe
from weight_sync.protocol.peer import RoundTracker
from weight_sync.protocol.rounds import ABORTED, NEVER, STORE, SUPERSEDED, TRANSPORT
from weight_sync.transfer_executor import MakeTransport, TransferExecutor, TransferOrder

log = logging.getLogger(__name__)

PREPARE_EVERY_S = 0.05
"""Between two pieces of room: each takes about 20 ms."""


@dataclass(frozen=True)
class Endpoint:
    """Endpoint of the publisher for receivers."""

    store_host: str
    store_port: int


@dataclass(frozen=True)
class _Cargo:
    """Content of a transfer, and the version that its differences are to, if it may send any."""

    slot: Slot
    buckets: Sequence[torch.Tensor]
    digests: Sequence[str]
    base: Slot | None = None
    sender: DeltaSender | None = None

    @property
    def carry_bucket(self) -> CarryBucket:
        if self.sender is not None:
            return self.sender.carry
        return partial(carry_whole, digests=self.digests)

    @property
    def num_deltas(self) -> int:
        return self.sender.num_deltas if self.sender is not None else 0

    @property
    def num_bytes(self) -> int:
        return self.sender.num_bytes if self.sender is not None else self.slot.num_bytes


class PublisherService:
    """See the module.

    Args:
        coordinator_address: RPC address of the coordinator.
        incarnation: Unique per process.
        pool: The segments of its stripe; closed with the service.
        endpoint: Told to the coordinator.
        make_transport: Makes the transport of a membership.
        bounds: Limits of a version.
        shelf: What is stored in `weight_sync.folder`, if there is one.
        desk: Of the learner's ranks, if they send themselves where they can; of stripe 0 alone.
        node: As of `ReceiverService`.
    """

    def __init__(
        self,
        coordinator_address: str,
        incarnation: str,
        pool: SegmentPool,
        endpoint: Endpoint,
        make_transport: MakeTransport,
        runtime: Runtime,
        bind: str = "tcp://127.0.0.1:*",
        keys: RunKeys | None = None,
        bounds: VersionBounds = ANY_VERSION,
        shelf: Shelf | None = None,
        node: str = "",
        desk: Desk | None = None,
    ) -> None:
        self._shelf, self._desk = shelf, desk
        self._server = Server(runtime, bind, keys.server if keys else None, limits_of(bounds))
        self._bounds = bounds
        client_keys, name = keys.client if keys else None, pool.stripe.publisher
        self._pool = pool
        self._endpoint = endpoint
        self._transfers = TransferExecutor(runtime, make_transport)
        self._incarnation, self._node = incarnation, node
        self._session = CoordinatorSession(
            runtime, coordinator_address, name, incarnation, self._introduce, self._deliver, client_keys
        )
        self._clock: Clock = runtime
        self._rounds = RoundTracker()
        self._sending: dict[int, TransferOrder] = {}
        self._transfer_starts: dict[int, float] = {}  # of threads that run, also of aborted rounds
        self._longest_transfer_s = 0.0
        self._current: Manifest | None = pool.current.manifest if pool.current else None
        self._is_full = False
        self._prepare_at = -math.inf
        self._waiting: Request | None = None
        self.counters: Counter[str] = Counter()
        self._snapshot = PublisherStatus(state=ServiceState.STARTING, address=self._server.address)
        self._ops = Operations("the publisher")
        self._ops.add(wire.OPEN, self._open)
        self._ops.add(wire.ACQUIRE, self._acquire)
        self._ops.add(wire.AWAIT_ROOM, self._await_room)
        self._ops.add(wire.COMMIT, self._commit)
        self._ops.add(wire.CURRENT, lambda _, __: wire.Current(self._current_number))
        self._ops.add(wire.PUBLISHER_STATUS, lambda _, __: self._describe())
        if desk is not None:
            desk.add_operations(self._ops)
            desk.on_change = lambda: self._session.report(told.SeatsChanged(desk.num_seats))

    def run(self, stop: Event) -> None:
        """Serve until `stop`, then unlink the segments."""
        self._session.start()
        try:
            self._server.serve(self, stop, self.end_turn)
        finally:
            self._session.stop()
            self._transfers.close()
            self._pool.close()
            if self._shelf is not None:
                self._shelf.close()

    def status(self) -> PublisherStatus:
        """Return how it is, as of the last turn."""
        return msgspec.structs.replace(self._snapshot, longest_transfer_s=self._longest_s())

    def command(self, command: AnyCommand) -> Message:
        """Nothing can be asked of the publisher but to stop."""
        raise unknown_command("the publisher", command)

    def handle(self, request: Request) -> None:
        """Answer the learner; see `publisher_client.py` for the other side."""
        self._ops.handle(request)

    def _open(self, request: Request, asked: wire.Open) -> Done:
        self._pool.open(asked.token)
        return Done()

    def wake_at(self) -> float:
        """Return when the next piece of room for the next versions is to be made, or the desk has to do."""
        return min(self._prepare_at, self._desk.wake_at() if self._desk is not None else math.inf)

    def end_turn(self) -> None:
        """Renew the status; what has come may have left room to make, or a free segment."""
        if self._has_room:
            self._end_wait()
        self._prepare_at = min(self._prepare_at, self._clock.now() + PREPARE_EVERY_S)
        self._snapshot = self._describe()

    def tick(self, now: float) -> None:
        """Make room for the next versions, piece by piece: requests are taken in between."""
        if self._desk is not None:
            self._desk.tick()
        has_more = self._make_room()
        self._prepare_at = self._clock.now() + PREPARE_EVERY_S if has_more else math.inf
        self._snapshot = self._describe()

    def _describe(self) -> PublisherStatus:
        current = self._current.version if self._current else None
        return PublisherStatus(
            state=ServiceState.READY,
            address=self._server.address,
            version=(current.number, current.step) if current else None,
            segments=tuple(self._pool.describe()),
            transfers=len(self._transfer_starts),
            longest_transfer_s=self._longest_s(),
            counters=self.counters + self._session.counters + self._server.tell_counters(),
        )

    @property
    def _current_number(self) -> int:
        return self._current.version.number if self._current else UNLOADED

    @property
    def _shared_path(self) -> str:
        """Name under which processes of this node may map the newest version."""
        return self._pool.current.shared if self._pool.current else ""

    def _longest_s(self) -> float:
        """Return how long the longest transfer took, those included that run."""
        now, starts = self._clock.now(), list(self._transfer_starts.values())  # at once: any thread may ask
        return max([self._longest_transfer_s, *(now - start for start in starts)])

    def _acquire(self, request: Request, asked: wire.Acquire) -> wire.Acquired:
        self._bounds.check_size(asked.num_bytes)
        path = self._pool.acquire(asked.token, asked.num_bytes)
        if self._session.is_fenced:  # another process has its place: what it took would reach nobody
            path = None
        self.counters["deferred" if path is None else "acquired"] += 1
        return wire.Acquired(path or "")

    @property
    def _has_room(self) -> bool:
        return not self._session.is_fenced and self._pool.next_to_write() is not None

    def _await_room(self, request: Request, asked: wire.AwaitRoom) -> None:
        self._pool.open(asked.token)
        self._end_wait()
        self._waiting = request

    def _end_wait(self) -> None:
        """Answer the parked `await_room`, if there is one: its learner looks again."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            send_answer(waiting, Answer(Done()))

    def _make_room(self) -> bool:
        """Make some room; return whether there may be more to make."""
        if self._is_full:
            return False
        try:
            return self._pool.prepare()
        except SyncError as error:  # the learner hears of it if it asks for a segment before there is room
            self._is_full = True
            self.counters["no_room"] += 1
            log.warning("no room for the next version: %s", error)
            return False

    def _commit(self, request: Request, asked: wire.Commit) -> Done:
        if not request.frames:
            raise WireError("a commit without a manifest")
        data = bytes(request.frames[0])
        manifest = Manifest.from_bytes(data, self._bounds)
        fault_point("publisher.commit", manifest.version.number)
        self._pool.commit(asked.token, asked.path, manifest)
        if manifest != self._current:
            self._current, self._is_full = manifest, False
            self._session.report(told.Published(self._shared_path), [data])
            self.counters["published"] += 1
        return Done()

    def _introduce(self) -> Introduction:
        slot = self._pool.current  # once: another thread may put a newer version there
        current = slot.manifest if slot is not None else None
        hello = told.PublisherHello(
            name=self._pool.stripe.publisher,
            incarnation=self._incarnation,
            store_host=self._endpoint.store_host,
            store_port=self._endpoint.store_port,
            folder=self._shelf.place if self._shelf is not None else "",
            node=self._node,
            path=slot.shared if slot is not None else "",
            seats=self._desk.num_seats if self._desk is not None else 0,
            stripe=self._pool.stripe.index,
            num_stripes=self._pool.stripe.count,
        )
        return Introduction(hello, [current.to_bytes()] if current else [])

    def _deliver(self, order: told.Instruction, manifest: bytes) -> None:
        self._server.call_soon(partial(self._obey, order))

    def _obey(self, order: told.Instruction) -> None:
        match order:
            case told.Transfer():
                self._send(TransferOrder.of(order))
            case told.Abort():
                self._abort(order.round)
            case told.Close() if self._shelf is not None:
                self._shelf.release(order.round)
            case Reset():
                for round_id in self._rounds.open_rounds:
                    self._abort(round_id)
                if self._shelf is not None:
                    self._shelf.release_all()
            case _:
                log.warning("the order '%s' is none for the publisher", order.kind)
                self.counters["unknown_orders"] += 1

    def _send(self, order: TransferOrder) -> None:
        if not self._rounds.begin(order.round, needs_offer=False):
            return  # the same order again, or its abort has come before
        if order.sources:
            self._send_directly(order)
            return
        slot = self._pool.hold(order.number)
        if slot is None or slot.manifest is None or slot.bytes_B is None:
            self.counters[SUPERSEDED] += 1
            self._rounds.end(order.round)
            self._session.report(told.SendFailed(order.round, SUPERSEDED))
            return
        fault_point("publisher.transfer", order.number)
        if order.group.folder and self._shelf is not None:
            self._shelf.hold(order.round, order.number, is_afresh=order.is_afresh)
        self._sending[order.round] = order
        self._transfer_starts[order.round] = self._clock.now()
        cargo = _load(self._pool, order, slot, cut(slot.bytes_B, slot.manifest, self._pool.stripe))
        if order.base != UNLOADED and cargo.base is None:
            self.counters["lost_bases"] += 1
        done, after_bucket = partial(self._put_end, cargo), _count_bucket(order.number)
        self._transfers.carry(order, cargo.buckets, after_bucket, done, cargo.carry_bucket)

    def _send_directly(self, order: TransferOrder) -> None:
        """Have the learner's ranks send what they hold."""
        fault_point("publisher.transfer", order.number)
        self._sending[order.round] = order
        self._transfer_starts[order.round] = self._clock.now()
        if self._desk is None:
            self._end_transfer(order, TRANSPORT, "weight_sync.backend is not direct here", 0)
        else:
            self._desk.carry(order, (), lambda _: None, partial(self._end_transfer, order))

    def _abort(self, round_id: int) -> None:
        is_known, now = self._rounds.stage_of(round_id) is not None, self._clock.now()
        begun_s = now - self._transfer_starts.get(round_id, -math.inf) if is_known else NEVER
        self._rounds.abort(round_id)
        self._session.report(told.SendFailed(round_id, ABORTED, begun_s))
        order = self._sending.pop(round_id, None)
        if order is not None and order.sources:
            assert self._desk is not None, "it has the transfer"
            self._desk.abort(round_id)
            self._note_took(round_id)
        elif order is not None:  # the thread ends by itself and releases the slot then
            self._transfers.abort(order.group.membership)

    def _put_end(self, cargo: _Cargo, order: TransferOrder, cause: str, message: str) -> None:
        self._server.call_soon(partial(self._end, cargo, order, cause, message))

    def _end(self, cargo: _Cargo, order: TransferOrder, cause: str, message: str) -> None:
        self._pool.release(cargo.slot)
        if cargo.base is not None:
            self._pool.release(cargo.base)
        if cause:
            self._transfers.abort(order.group.membership)
        else:
            self._pool.note_sent(cargo.slot)
            self.counters["deltas"] += cargo.num_deltas
        self._end_transfer(order, cause, message, cargo.num_bytes)

    def _end_transfer(self, order: TransferOrder, cause: str, message: str, num_bytes: int) -> None:
        self._note_took(order.round)
        self._sending.pop(order.round, None)
        self._rounds.end(order.round)
        if cause:
            self.counters["failed_transfers"] += 1
            log.warning("round %d with version %d failed: %s", order.round, order.number, message)
            is_told = cause == SUPERSEDED or cause.startswith(STORE)
            self._session.report(told.SendFailed(order.round, cause if is_told else TRANSPORT))
        else:
            self.counters["transfers"] += 1
            fault_point("publisher.sent", order.number)
            self._session.report(told.Sent(order.round, num_bytes))

    def _note_took(self, round_id: int) -> None:
        took_s = self._clock.now() - self._transfer_starts.pop(round_id)
        self._longest_transfer_s = max(self._longest_transfer_s, took_s)


def _load(pool: SegmentPool, order: TransferOrder, slot: Slot, buckets: Sequence[torch.Tensor]) -> _Cargo:
    assert slot.manifest is not None, "a slot that is held holds a version"
    layout, own = slot.manifest.layout, pool.stripe.buckets(len(slot.manifest.buckets))
    digests = slot.manifest.digests[own.start : own.stop]
    if order.base == UNLOADED:
        return _Cargo(slot, buckets, digests)
    base, before = pool.hold(order.base), None
    if base is not None and base.manifest is not None and base.bytes_B is not None:
        before = cut(base.bytes_B, base.manifest, pool.stripe) if base.manifest.layout == layout else None
    widths = choose_widths(layout)[own.start : own.stop]
    sender = DeltaSender(before, widths, DeltaNames(digests, order.base))
    return _Cargo(slot, buckets, digests, base, sender)


def cut(bytes_B: torch.Tensor, manifest: Manifest, stripe: Stripe = WHOLE) -> list[torch.Tensor]:
    """Return the buckets of `stripe` as slices of `bytes_B`: the whole address space, or the stripe's own."""
    first = 0 if len(bytes_B) == manifest.total_bytes else manifest.layout.span(stripe)[0]
    ranges = [manifest.bucket_range(index) for index in stripe.buckets(len(manifest.buckets))]
    return [bytes_B[start - first : end - first] for start, end in ranges]


def _count_bucket(number: int) -> Callable[[int, torch.Tensor], None]:
    def after_bucket(index: int, bucket: torch.Tensor) -> None:
        fault_point("publisher.bucket", number, index)

    return after_bucket
