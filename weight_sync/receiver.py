"""The receiver service, beside one engine: holds verified copies until the engine loads them.

Owns the staging segments and their states: receiving → verified → committed → taken by the engine.
Never touches the engine, so it may be killed without harm to it. A copy that the engine has taken is not
overwritten before the replica reports the end of the load.
The server's thread
  consumes: orders, ends of transfers, the replica's calls   waits for: the same, the end of a poll
  unblocked by: the same, a coordinator that is overdue      produces: reports; a `Staged` to the replica
Invariant: only bytes whose digests matched are ever handed to the engine.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import torch
import xxhash

from asyncrl.core.errors import AsyncrlError, SyncError, WireError
from asyncrl.core.rpc import Request, Server
from asyncrl.core.rpc.message import Answer, Message, Operation
from asyncrl.core.rpc.operations import Operations, send_answer
from asyncrl.core.runtime.clock import Clock
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.service_command import AnyCommand, Drain, Standing, unknown_command
from asyncrl.core.service_status import ReceiverStatus
from asyncrl.core.sockets.keys import RunKeys
from asyncrl.core.staleness import UNLOADED
from asyncrl.core.states import ServiceState
from weight_sync import messages as wire
from weight_sync.backends.contract import Transport
from weight_sync.bounds import limits_of
from weight_sync.coordination.order_queue import ReportLog
from weight_sync.coordinator_session import CoordinatorSession, Introduction, Reset
from weight_sync.encoding.delta_codec import CarryBucket, DeltaReceiver, carry_whole
from weight_sync.memory.manifest import ANY_VERSION, Manifest, VersionBounds
from weight_sync.memory.staging_area import Copy, StagingArea
from weight_sync.protocol import messages as told
from weight_sync.protocol.peer import Pin, RoundTracker, Stage
from weight_sync.protocol.rounds import ABORTED
from weight_sync.publisher import cut
from weight_sync.transfer_executor import AfterBucket, Check, DigestMismatch, TransferExecutor, TransferOrder

log = logging.getLogger(__name__)
R = TypeVar("R", bound=wire.OfReplica)

OnBucket = Callable[[int, int, torch.Tensor], None]
"""Called with version number, bucket index and the received bytes, before they are verified."""
PINS = (wire.PIN.name, wire.UNPIN.name)
REPLICA_OPS = (wire.NEXT_STAGED.name, wire.LOADED.name, wire.DRAIN.name, *PINS)
"""Operations that a replica may call on its receiver; services call all others."""


def ignore_bucket(number: int, index: int, bucket: torch.Tensor) -> None:
    """Do nothing; tests put a fault here."""


@dataclass
class _Incoming:
    """A round that this receiver takes part in."""

    round: int
    copy: Copy
    order: TransferOrder | None = None
    num_buckets: int = 0
    is_reserved: bool = False


@dataclass
class _Parked:
    request: Request
    until: float


class ReceiverService:
    """See the module.

    Args:
        name: `receiver.<n>`.
        incarnation: Unique per process.
        staging: The staging segments; closed with the service.
        lost_s: Without the coordinator for so long, unverified rounds are aborted and a verified one
            is committed alone.
        on_bucket: See `OnBucket`.
        bounds: Limits on the size and layout of a version.
    """

    def __init__(
        self,
        coordinator_address: str,
        name: str,
        incarnation: str,
        staging: StagingArea,
        make_transport: Callable[[], Transport],
        runtime: Runtime,
        lost_s: float,
        on_bucket: OnBucket = ignore_bucket,
        bind: str = "tcp://127.0.0.1:*",
        keys: RunKeys | None = None,
        bounds: VersionBounds = ANY_VERSION,
    ) -> None:
        self._server = Server(runtime, bind, keys.server if keys else None, limits_of(bounds), REPLICA_OPS)
        self._bounds = bounds
        client_keys = keys.client if keys else None
        self._name, self._incarnation = name, incarnation
        self._staging = staging
        self._clock: Clock = runtime
        self._lost_s = lost_s
        self._on_bucket = on_bucket
        self._transfers = TransferExecutor(runtime, make_transport)
        self._session = CoordinatorSession(
            runtime, coordinator_address, name, incarnation, self._introduce, self._deliver, client_keys
        )
        self._rounds = RoundTracker()
        self._incoming: dict[int, _Incoming] = {}
        self._transfer_starts: dict[int, float] = {}  # by round, while its thread runs, also after an abort
        self._longest_transfer_s = 0.0
        self._serving = UNLOADED
        self._is_attended = self._is_draining = False
        self._pin = Pin()
        self._replica_incarnation, self._newest_started_ns = "", 0
        self._parked: _Parked | None = None
        self._heard = ReportLog()
        self.counters: Counter[str] = Counter()
        self._snapshot = ReceiverStatus(state=ServiceState.STARTING, address=self._server.address)
        self._ops = Operations("the receiver")
        self._add_operations()

    def run(self, stop: Event) -> None:
        """Serve until `stop`, then unlink the staging segments."""
        self._session.start()
        try:
            self._server.serve(self, stop, self.end_turn)
        finally:
            self._session.stop()
            self._transfers.close()
            self._staging.close()

    def status(self) -> ReceiverStatus:
        """Return the status as of the last turn of the event loop."""
        return msgspec.structs.replace(self._snapshot, longest_transfer_s=self._longest_s())

    def command(self, command: AnyCommand) -> Message:
        """Drain: accept no more offers."""
        if not isinstance(command, Drain):
            raise unknown_command("a receiver", command, "It knows 'drain'")
        self._server.call_soon(self._drain)
        return Standing(ServiceState.DRAINING)

    # --- the replica's calls ----------------------------------------------------------------------

    def _add_operations(self) -> None:
        self._ops.add(wire.RECEIVER_STATUS, lambda _, __: self._describe())
        self._add(wire.NEXT_STAGED, self._take_poll)
        self._add(wire.LOADED, self._take_loaded)
        self._add(wire.PIN, lambda _, asked: self._set_pin(asked, is_held=True))
        self._add(wire.UNPIN, lambda _, asked: self._set_pin(asked, is_held=False))
        self._add(wire.DRAIN, lambda _, __: self._drain())

    def _add(
        self, operation: Operation[R, wire.Handed], do: Callable[[Request, R], wire.Handed | None]
    ) -> None:
        """Register `do`; late calls, and those of a superseded process of the replica, do not reach it."""
        channel = "pins" if operation.name in PINS else "polls"

        def hear(request: Request, asked: R) -> wire.Handed | None:
            if self._is_superseded(asked):
                self.counters["past_calls"] += 1
                return wire.Handed(fenced=True, past=True)
            if self._is_late(asked, channel):
                self.counters["late_calls"] += 1
                return wire.Handed(fenced=self._session.is_fenced)
            return do(request, asked)

        self._ops.add(operation, hear)

    def handle(self, request: Request) -> None:
        """Answer the replica; see `link.py` for the other side."""
        self._ops.handle(request)
        self._answer_poll()

    def wake_at(self) -> float:
        """Return when the replica's poll is over, or the coordinator may be lost."""
        return min(self._parked.until if self._parked is not None else math.inf, self._session.look_at)

    def end_turn(self) -> None:
        """Renew the status."""
        self._snapshot = self._describe()

    def tick(self, now: float) -> None:
        """End empty polls; act alone if the coordinator is lost."""
        if self._session.lost_for_s >= self._lost_s:
            self._act_alone()
        self._answer_poll()
        if self._parked is not None and self._clock.now() >= self._parked.until:
            self._end_poll(None)
        self._snapshot = self._describe()

    def _is_superseded(self, asked: wire.OfReplica) -> bool:
        """Tell whether the caller is an older process of the replica than one that has called."""
        self._newest_started_ns = max(self._newest_started_ns, asked.started_ns)
        return 0 < asked.started_ns < self._newest_started_ns

    def _is_late(self, asked: wire.OfReplica, channel: str) -> bool:
        """Tell whether the replica has made a newer call: the state that this one tells of is out of date."""
        return asked.seq is not None and not self._heard.is_new(channel, asked.incarnation, asked.seq)

    def _take_poll(self, request: Request, asked: wire.NextStaged) -> None:
        if self._parked is not None:
            self._end_poll(None)  # the replica asks anew; it no longer waits for the older answer
        self._note_process(asked.incarnation)
        self._note_serving(asked.serving)
        if not self._is_attended:
            self._is_attended = True
            self._session.report(told.Attended())
        self._parked = _Parked(request, self._clock.now() + asked.wait_s)

    def _note_process(self, incarnation: str) -> None:
        self._note_pin(self._pin.meet(incarnation))
        if incarnation != self._replica_incarnation:
            self._replica_incarnation = incarnation
            self._staging.quarantine()

    def _note_serving(self, serving: int) -> None:
        if serving < self._serving:
            self.counters["replica_restarts"] += 1
            self._serving = serving
            self._staging.release_copies()
            self._note_pin(self._pin.end())
            self._session.report(told.Restarted(serving))
        elif serving > self._serving:
            self._serving = serving
            self._staging.finish_load(serving, is_ok=True)
            self._session.report(told.LoadEnded(serving, ok=True, error=""))

    def _take_loaded(self, request: Request, asked: wire.Loaded) -> wire.Handed:
        number, is_ok, error = asked.number, asked.ok, asked.error[: wire.MAX_ERROR_CHARACTERS]
        self._staging.finish_load(number, is_ok)
        self._serving = number if is_ok else UNLOADED
        self.counters["loads" if is_ok else "failed_loads"] += 1
        self._session.report(told.LoadEnded(number, is_ok, error))
        return wire.Handed(fenced=self._session.is_fenced)

    def _set_pin(self, asked: wire.OfReplica, *, is_held: bool) -> wire.Handed:
        self._note_pin(self._pin.set(asked.incarnation, is_held))
        return wire.Handed(fenced=self._session.is_fenced)

    def _note_pin(self, has_changed: bool) -> None:
        if not has_changed:
            return
        if self._pin.is_held:
            self._staging.withdraw()  # as the coordinator does, which commits again after the unpin
        self._session.report(told.Pinned() if self._pin.is_held else told.Unpinned())

    def _drain(self) -> wire.Handed:
        if not self._is_draining:
            self._is_draining = True
            self._session.report(told.Draining())
        return wire.Handed(fenced=self._session.is_fenced)

    def _answer_poll(self) -> None:
        if self._parked is None or self._pin.is_held:
            return
        copy = self._staging.take(self._serving)
        if copy is not None:
            fault_point("receiver.hand_over", copy.number)
            self._end_poll(copy)

    def _end_poll(self, copy: Copy | None) -> None:
        assert self._parked is not None
        request, self._parked = self._parked.request, None
        handed = wire.Handed(copy.path if copy is not None else "", self._session.is_fenced)
        send_answer(request, Answer(handed, [copy.manifest.to_bytes()] if copy is not None else []))

    # --- the coordinator's orders -----------------------------------------------------------------

    def _introduce(self) -> Introduction:
        return Introduction(
            told.ReceiverHello(
                name=self._name,
                incarnation=self._incarnation,
                serving=self._serving,
                staged=max(self._staging.newest_verified, self._staging.taken_number),
                attended=self._is_attended,
                pinned=self._pin.is_held,
                draining=self._is_draining,
                base=self._staging.base_number,
            )
        )

    def _deliver(self, order: told.Instruction, manifest: bytes) -> None:
        self._server.call_soon(partial(self._obey, order, manifest))

    def _obey(self, order: told.Instruction, manifest: bytes) -> None:
        try:
            self._carry_out(order, manifest)
        except AsyncrlError as error:
            self.counters["refused_orders"] += 1
            log.warning("cannot obey '%s': %s", order.kind, error)
        self._answer_poll()

    def _carry_out(self, order: told.Instruction, manifest: bytes) -> None:
        match order:
            case told.Offer():
                self._accept(order.round, manifest)
            case told.Transfer():
                self._receive(TransferOrder.of(order))
            case told.Abort():
                self._abort(order.round)
            case told.Commit():
                self._commit(order.number)
            case told.Withdraw():
                self._staging.withdraw()
                self._is_attended = False
            case Reset():
                self._abort_all()
            case _:
                raise WireError(f"the order '{order.kind}' is none for a receiver")

    def _accept(self, round_id: int, manifest: bytes) -> None:
        is_new = self._rounds.offer(round_id)
        if is_new:
            try:
                copy = self._staging.make_room(Manifest.from_bytes(manifest, bounds=self._bounds))
            except (SyncError, WireError) as error:
                self._rounds.abort(round_id)
                self._refuse(round_id, error)
                return
            self._incoming[round_id] = _Incoming(round_id, copy)
        incoming = self._incoming.get(round_id)
        if incoming is not None and (is_new or incoming.is_reserved):  # else it is over, or being reserved
            self._reserve(round_id)

    def _reserve(self, round_id: int) -> None:
        """Reserve the next piece of an offer's memory, and accept the offer once it has all.

        Others are answered between two pieces: the coordinator would take a long silence for a death.
        """
        incoming = self._incoming.get(round_id)
        if incoming is None:
            return  # aborted meanwhile
        try:
            incoming.is_reserved = self._staging.reserve(incoming.copy)
        except SyncError as error:
            self._staging.give_back(self._incoming.pop(round_id).copy)
            self._rounds.abort(round_id)
            self._refuse(round_id, error)
            return
        if not incoming.is_reserved:
            self._server.call_soon(partial(self._reserve, round_id))
            return
        fault_point("receiver.offer", incoming.copy.number)
        self._session.report(told.Accepted(round_id))

    def _refuse(self, round_id: int, error: AsyncrlError) -> None:
        self.counters["refused_orders"] += 1
        log.warning("cannot take part in round %d: %s", round_id, error)
        self._session.report(told.Failed(round_id, f"refused: {error.message}"[: told.MAX_TEXT]))

    def _commit(self, number: int) -> None:
        fault_point("receiver.commit", number)
        if not self._pin.is_held:
            self._staging.commit(number)

    def _receive(self, order: TransferOrder) -> None:
        if not self._rounds.begin(order.round):
            return  # aborted meanwhile, or the same order again
        incoming = self._incoming[order.round]
        incoming.order = order
        fault_point("receiver.transfer", order.number)
        self._transfer_starts[order.round] = self._clock.now()
        copy = incoming.copy
        buckets = cut(copy.bytes_B, copy.manifest)
        verify = self._verifier(copy.manifest)

        def after_bucket(index: int, bucket: torch.Tensor) -> Check | None:
            check = verify(index, bucket)
            incoming.num_buckets = index + 1
            return check

        self._transfers.carry(order, buckets, after_bucket, self._put_end, self._carry_bucket(order, copy))

    def _carry_bucket(self, order: TransferOrder, copy: Copy) -> CarryBucket:
        if order.base == UNLOADED:
            return carry_whole
        base = self._staging.find_base(order.base, copy.manifest.layout)
        if base is None:
            self.counters["missing_bases"] += 1
        return DeltaReceiver(cut(base.bytes_B, base.manifest) if base is not None else None).carry

    def _verifier(self, manifest: Manifest) -> AfterBucket:
        number = manifest.version.number

        def verify(index: int, bucket: torch.Tensor) -> None:
            if xxhash.xxh3_128(bucket.numpy().data).hexdigest() != manifest.buckets[index].digest:
                raise DigestMismatch(f"bucket {index} of version {number} is not what the learner wrote")

        def after_bucket(index: int, bucket: torch.Tensor) -> Check:
            fault_point("receiver.bucket", number, index)
            self._on_bucket(number, index, bucket)
            return partial(verify, index, bucket)

        return after_bucket

    def _put_end(self, order: TransferOrder, cause: str, message: str) -> None:
        self._server.call_soon(partial(self._end, order, cause, message))

    def _end(self, order: TransferOrder, cause: str, message: str) -> None:
        took_s = self._clock.now() - self._transfer_starts.pop(order.round)
        self._longest_transfer_s = max(self._longest_transfer_s, took_s)
        if not self._rounds.end(order.round):  # aborted; only now is nobody writing into its segment
            self._staging.end_abandoned(order.round)
            self._answer_poll()
            return
        incoming = self._incoming.pop(order.round)
        if cause:
            self.counters[f"failed/{cause}"] += 1
            log.warning("round %d with version %d failed: %s", order.round, order.number, message)
            self._staging.give_back(incoming.copy)
            self._session.report(told.Failed(order.round, cause, incoming.num_buckets))
        else:
            self._staging.put_verified(incoming.copy)
            fault_point("receiver.verified", order.number)
            self._session.report(told.Verified(order.round, order.number))
        self._answer_poll()

    def _abort(self, round_id: int) -> None:
        stage = self._rounds.abort(round_id)
        if stage is None:
            return
        incoming = self._incoming.pop(round_id)
        self.counters["aborted"] += 1
        if stage is Stage.OFFERED or incoming.order is None:
            self._staging.give_back(incoming.copy)
        else:
            self._staging.abandon(round_id, incoming.copy)
            self._transfers.abort(incoming.order.group.membership)
        self._session.report(told.Failed(round_id, ABORTED, incoming.num_buckets))

    def _abort_all(self) -> None:
        for round_id in self._rounds.open_rounds:
            self._abort(round_id)

    def _act_alone(self) -> None:
        self._abort_all()
        if self._staging.commit_verified():
            self.counters["committed_alone"] += 1
            log.warning(
                "the coordinator is lost: version %d is committed alone", self._staging.newest_verified
            )

    def _longest_s(self) -> float:
        """Return how long the longest transfer took, those included that run."""
        now, starts = self._clock.now(), list(self._transfer_starts.values())  # at once: any thread may ask
        return max([self._longest_transfer_s, *(now - start for start in starts)])

    def _describe(self) -> ReceiverStatus:
        state = ServiceState.SYNCING if self._serving == UNLOADED else ServiceState.READY
        return ReceiverStatus(
            state=ServiceState.DRAINING if self._is_draining else state,
            address=self._server.address,
            version=self._serving,
            staged=self._staging.newest_verified,
            committed=self._staging.committed_number,
            pinned=self._pin.is_held,
            fenced=self._session.is_fenced,
            transfers=len(self._transfer_starts),
            longest_transfer_s=self._longest_s(),
            counters=self.counters + self._session.counters + self._server.tell_counters(),
        )
