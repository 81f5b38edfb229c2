"""The receiver service, beside one engine: holds verified copies until the engine loads them.

Owns the staging segments and their states: receiving, or mapped → verified → committed → taken by the engine.
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
from functools import partial

import msgspec
import torch

from asyncrl.core.errors import AsyncrlError, WireError
from asyncrl.core.rpc import Request, Server
from asyncrl.core.rpc.message import Message
from asyncrl.core.rpc.operations import Operations
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.service_command import AnyCommand, Drain, Standing, unknown_command
from asyncrl.core.sockets.keys import RunKeys
from asyncrl.core.staleness import UNLOADED
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ReceiverStatus
from weight_sync import messages as wire
from weight_sync.bounds import limits_of
from weight_sync.coordinator_session import CoordinatorSession, Introduction, Reset
from weight_sync.direct.desk import Desk
from weight_sync.memory.manifest import ANY_VERSION, VersionBounds
from weight_sync.memory.staging_area import StagingArea
from weight_sync.protocol import messages as told
from weight_sync.receiving.inbound_rounds import InboundRounds, OnBucket
from weight_sync.receiving.replica_session import REPLICA_OPS, ReplicaSession
from weight_sync.transfer_executor import MakeTransport, TransferOrder

log = logging.getLogger(__name__)


def ignore_bucket(number: int, index: int, bucket: torch.Tensor) -> None:
    """Do nothing; tests put a fault here."""


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
        by_folder: Versions come through `weight_sync.folder`.
        node: Mark of the shared memory that it sees; without one it maps nothing, and nobody maps its copies.
        desk: As of `InboundRounds`.
    """

    def __init__(
        self,
        coordinator_address: str,
        name: str,
        incarnation: str,
        staging: StagingArea,
        make_transport: MakeTransport,
        runtime: Runtime,
        lost_s: float,
        on_bucket: OnBucket = ignore_bucket,
        bind: str = "tcp://127.0.0.1:*",
        keys: RunKeys | None = None,
        bounds: VersionBounds = ANY_VERSION,
        node: str = "",
        desk: Desk | None = None,
        *,
        by_folder: bool = False,
    ) -> None:
        self._by_folder, self._desk = by_folder, desk
        self._server = Server(runtime, bind, keys.server if keys else None, limits_of(bounds), REPLICA_OPS)
        client_keys = keys.client if keys else None
        self._name, self._incarnation, self._node = name, incarnation, node
        self._staging = staging
        self._lost_s = lost_s
        self._session = CoordinatorSession(
            runtime, coordinator_address, name, incarnation, self._introduce, self._deliver, client_keys
        )
        self.counters: Counter[str] = Counter()
        self._replica = ReplicaSession(staging, self._session, runtime, self.counters)
        self._rounds = InboundRounds(
            staging,
            make_transport,
            self._session.report,
            self._server.call_soon,
            on_bucket,
            self._replica.answer_poll,
            bounds,
            self.counters,
            runtime,
            desk,
        )
        self._snapshot = ReceiverStatus(state=ServiceState.STARTING, address=self._server.address)
        self._ops = Operations("the receiver")
        self._ops.add(wire.RECEIVER_STATUS, lambda _, __: self._describe())
        self._replica.add_operations(self._ops)
        if desk is not None:
            desk.add_operations(self._ops)
            desk.on_loss = self._replica.lose_direct_copies
            desk.on_change = lambda: self._session.report(told.SeatsChanged(desk.num_seats))

    def run(self, stop: Event) -> None:
        """Serve until `stop`, then unlink the staging segments."""
        self._session.start()
        try:
            self._server.serve(self, stop, self.end_turn)
        finally:
            self._session.stop()
            self._rounds.close()
            self._staging.close()

    def status(self) -> ReceiverStatus:
        """Return the status as of the last turn of the event loop."""
        return msgspec.structs.replace(self._snapshot, longest_transfer_s=self._rounds.longest_transfer_s())

    def command(self, command: AnyCommand) -> Message:
        """Drain: accept no more offers."""
        if not isinstance(command, Drain):
            raise unknown_command("a receiver", command, "It knows 'drain'")
        self._server.call_soon(self._replica.drain)
        return Standing(ServiceState.DRAINING)

    def handle(self, request: Request) -> None:
        """Answer the replica."""
        self._ops.handle(request)
        self._replica.answer_poll()

    def wake_at(self) -> float:
        """Return when the replica's poll is over, the coordinator may be lost, or the desk has to do."""
        desk_at = self._desk.wake_at() if self._desk is not None else math.inf
        return min(self._replica.poll_ends_at, self._session.look_at, desk_at)

    def end_turn(self) -> None:
        """Renew the status."""
        self._snapshot = self._describe()

    def tick(self, now: float) -> None:
        """End empty polls; act alone if the coordinator is lost."""
        if self._desk is not None:
            self._desk.tick()
        if self._session.lost_for_s >= self._lost_s:
            self._act_alone()
        self._replica.answer_poll()
        self._replica.end_overdue_poll()
        self._snapshot = self._describe()

    # --- the coordinator's orders -----------------------------------------------------------------

    def _introduce(self) -> Introduction:
        shared, shared_path = self._staging.shared
        return Introduction(
            told.ReceiverHello(
                name=self._name,
                incarnation=self._incarnation,
                serving=self._replica.serving,
                staged=max(self._staging.newest_verified, self._staging.taken_number),
                attended=self._replica.is_attended,
                pinned=self._replica.is_pinned,
                draining=self._replica.is_draining,
                base=self._staging.base_number,
                direct_base=self._staging.direct_base,
                by_folder=self._by_folder,
                node=self._node,
                shared=shared,
                shared_path=shared_path,
                seats=self._desk.num_seats if self._desk is not None else 0,
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
        self._replica.answer_poll()

    def _carry_out(self, order: told.Instruction, manifest: bytes) -> None:
        match order:
            case told.Offer():
                self._rounds.accept(order, manifest)
            case told.Transfer():
                self._rounds.receive(TransferOrder.of(order))
            case told.MapCopy():
                self._rounds.map_copy(order, manifest)
            case told.Abort():
                self._rounds.abort(order.round)
            case told.Commit():
                self._commit(order.number)
            case told.Withdraw():
                self._staging.withdraw()
                self._replica.is_attended = False
            case Reset():
                self._rounds.abort_all()
            case _:
                raise WireError(f"a receiver does not take the order '{order.kind}'")

    def _commit(self, number: int) -> None:
        fault_point("receiver.commit", number)
        if not self._replica.is_pinned:
            self._staging.commit(number)

    def _act_alone(self) -> None:
        self._rounds.abort_all()
        if self._staging.commit_verified():
            self.counters["committed_alone"] += 1
            log.warning(
                "the coordinator is lost: version %d is committed alone", self._staging.newest_verified
            )

    def _describe(self) -> ReceiverStatus:
        state = ServiceState.SYNCING if self._replica.serving == UNLOADED else ServiceState.READY
        return ReceiverStatus(
            state=ServiceState.DRAINING if self._replica.is_draining else state,
            address=self._server.address,
            version=self._replica.serving,
            staged=self._staging.newest_verified,
            committed=self._staging.committed_number,
            pinned=self._replica.is_pinned,
            fenced=self._session.is_fenced,
            transfers=self._rounds.num_transfers,
            longest_transfer_s=self._rounds.longest_transfer_s(),
            counters=self.counters + self._session.counters + self._server.tell_counters(),
        )
