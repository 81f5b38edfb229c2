"""The coordinator service: carries `protocol.Coordination` over RPC.

Owns who takes part in which round; holds no weights and never touches a transfer.
  consumes: hellos, reports and polls of the publisher and the receivers    waits for: a request, what is due
  unblocked by: the same    produces: orders, as answers to the parked polls; the journal of rounds
Invariants: an order is kept until its peer acknowledges it with its next poll; a coordinator that hears
of a newer one's fencing token gives no more orders.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncrl.core.errors import FencedError, WireError
from asyncrl.core.rpc import Request, Server
from asyncrl.core.rpc.message import A, Answer, Message, Operation
from asyncrl.core.rpc.operations import Operations, send_answer
from asyncrl.core.runtime.clock import Clock
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.service_command import AnyCommand, unknown_command
from asyncrl.core.sockets.keys import ServerKeys
from asyncrl.core.staleness import PolicyVersion
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import CoordinatorStatus, MemberStatus
from weight_sync.bounds import limits_of
from weight_sync.coordination.conversions import (
    members_status,
    obstacles_of,
    publisher_info_of,
    rounds_status,
)
from weight_sync.coordination.journal import Journal
from weight_sync.coordination.order_queue import (
    KnownVersion,
    OrderQueue,
    OrderQueues,
    ReportLog,
    fill,
    forget_versions,
)
from weight_sync.memory.manifest import ANY_VERSION, Manifest, VersionBounds
from weight_sync.protocol import messages as wire
from weight_sync.protocol.protocol import Coordination
from weight_sync.sync_records import (
    BlameRecord,
    LoadFailureRecord,
    MembersRecord,
    Record,
    RoundRecord,
)

log = logging.getLogger(__name__)

PICTURE_S, PICTURE_MEMBERS = 1.0, 64
"""The members are journalled at most so often; more than so many less often, as the journal is bounded."""
DESCRIBE_S = 1e-4
"""A status is as old as this, times the members: some twenty times what it costs to describe them."""
P = TypeVar("P", bound=wire.OfPeer)


class CoordinatorService:
    """See the module.

    Args:
        run_dir: Folder of the journal of its rounds; None keeps no journal.
        bounds: Limits of a version.
    """

    def __init__(
        self,
        coordination: Coordination,
        runtime: Runtime,
        bind: str = "tcp://127.0.0.1:*",
        keys: ServerKeys | None = None,
        run_dir: Path | None = None,
        bounds: VersionBounds = ANY_VERSION,
    ) -> None:
        self._coordination = coordination
        self._clock: Clock = runtime
        self._server = Server(runtime, bind, keys, limits_of(bounds))
        self._bounds = bounds
        self._journal = Journal(
            run_dir, coordination.token, fences=coordination.fences, wall_ns=runtime.wall_ns
        )
        self._queues = OrderQueues()
        self._outdated: list[tuple[Request, str, bool]] = []
        self._reports, self._hellos = ReportLog(), ReportLog()
        self._versions: dict[int, KnownVersion] = {}
        self._longest_round_s = 0.0
        self._last_picture: Mapping[str, MemberStatus] = {}
        self._picture_at = 0.0
        self._described_until = -math.inf
        self._is_status_old = self._is_picture_old = True
        self._newer_token = 0
        self._snapshot = self._describe(ServiceState.STARTING)
        self._ops = Operations("the coordinator")
        self._ops.add(wire.STATUS, lambda _, __: self._snapshot)
        self._add(
            wire.HELLO, lambda _, asked: self._handle_hello(asked, partial(self._coordination.hello, asked))
        )
        self._add(wire.PUBLISHER_HELLO, self._handle_publisher_hello)
        self._add(wire.NEXT_ORDER, self._park)
        self._add(wire.REPORT, self._take_report)

    def run(self, stop: Event) -> None:
        """Serve until `stop`."""
        try:
            self._server.serve(self, stop, self.end_turn)
        finally:
            self._journal_members(is_forced=True)

    def status(self) -> CoordinatorStatus:
        """Return how it is, as it was described last."""
        return self._snapshot

    def command(self, command: AnyCommand) -> Message:
        """Nothing can be asked of the coordinator but to stop."""
        raise unknown_command("the coordinator", command)

    def handle(self, request: Request) -> None:
        """Take one request; see `session.py` for the other side. `end_turn` answers what it leads to."""
        self._ops.handle(request)

    def _add(self, operation: Operation[P, A], do: Callable[[Request, P], A | None]) -> None:
        """Let `do` handle a peer's request, unless the peer obeys a newer coordinator."""

        def hear(request: Request, asked: P) -> A | None:
            self._check_token(asked.token)
            return do(request, asked)

        self._ops.add(operation, hear)

    def wake_at(self) -> float:
        """Return when a deadline of the rounds, a poll, or the status is due."""
        due = math.inf if self._newer_token else self._coordination.wake_at()
        status_at = self._described_until if self._is_status_old else math.inf
        picture_at = self._picture_at if self._is_picture_old else math.inf
        return min(due, self._queues.ends_at, status_at, picture_at)

    def tick(self, now: float) -> None:
        """Let deadlines pass and empty polls return."""
        if not self._newer_token:
            self._coordination.tick(self._clock.now())
        self.end_turn()
        for name, box in self._queues.take_ended(self._clock.now()):
            self._answer(name, box)
        self._tell()

    def _check_token(self, token: int) -> None:
        """Refuse who obeys a newer coordinator: this one was replaced, and must give no more orders."""
        self._newer_token = max(self._newer_token, token if token > self._coordination.token else 0)
        if self._newer_token:
            raise FencedError(
                f"this coordinator's token {self._coordination.token} is older than {self._newer_token}",
                hint="Another coordinator has taken over; connect to that one",
            )

    # --- hellos -----------------------------------------------------------------------------------

    def _handle_publisher_hello(self, request: Request, asked: wire.PublisherHello) -> wire.HelloReply:
        def join(now: float) -> bool:
            current, num_bytes = self._take_manifest(request)
            return self._coordination.publisher_hello(publisher_info_of(asked, now), current, now, num_bytes)

        return self._handle_hello(asked, join)

    def _handle_hello(self, asked: wire.Hello, join: Callable[[float], bool]) -> wire.HelloReply:
        """Let a peer join, unless it has said something later.

        Args:
            join: Called with the time; returns whether the peer is accepted.
        """
        name, incarnation = asked.name, asked.incarnation
        if asked.seq and not self._hellos.is_new(name, incarnation, asked.seq):
            # It was read behind a later one, and its info is old: a member would be thought to serve nothing.
            return self._answer_hello(is_accepted=True)
        if asked.told is not None and asked.told < self._reports.newest(name, incarnation):
            # A report that was made after its info was read before it: the info would undo what that said.
            return self._answer_hello(is_accepted=True, is_outdated=True)
        is_accepted = join(self._clock.now())
        if is_accepted:
            box = self._queues.get(name)
            if box is not None and box.parked is not None:
                self._outdated.append((box.parked, name, box.incarnation == incarnation))
            self._queues.open(name, incarnation, self._coordination.token)
        log.info("hello %s %s", name, "" if is_accepted else "(refused)")
        return self._answer_hello(is_accepted=is_accepted)

    def _answer_hello(self, *, is_accepted: bool, is_outdated: bool = False) -> wire.HelloReply:
        coordination = self._coordination
        return wire.HelloReply(coordination.token, coordination.timing.poll_s, is_accepted, is_outdated)

    def _take_manifest(self, request: Request) -> tuple[PolicyVersion | None, int]:
        """Return the version and its size in bytes; None and 0 if the request brings no manifest."""
        if not request.frames:
            return None, 0
        data = bytes(request.frames[0])
        manifest = Manifest.from_bytes(data, bounds=self._bounds)
        self._versions[manifest.version.number] = KnownVersion.of(data, manifest)
        return manifest.version, manifest.total_bytes

    # --- polls and reports ------------------------------------------------------------------------

    def _park(self, request: Request, asked: wire.NextOrder) -> wire.Orders | None:
        box = self._queues.get(asked.name)
        if box is None or not self._is_known(asked):
            return wire.Orders(self._coordination.token, known=False)
        box.acknowledge(asked.after)
        if box.parked is not None:  # after a pause an old poll may be read behind the one that is waited for
            self._outdated.append((box.parked, asked.name, True))
        self._queues.park(asked.name, request, self._clock.now() + self._coordination.timing.poll_s)
        return None

    def _is_known(self, asked: wire.OfPeer) -> bool:
        return self._coordination.seen(asked.name, asked.incarnation, self._clock.now())

    def _take_report(self, request: Request, asked: wire.Report) -> wire.Reported:
        token = self._coordination.token
        if not self._is_known(asked):
            return wire.Reported(token, known=False)
        if not asked.seq or self._reports.is_new(asked.name, asked.incarnation, asked.seq):
            if asked.name in self._coordination.members:
                self._hear_receiver(asked.name, wire.read_event(asked.name, asked, wire.OF_RECEIVER))
            else:
                event = wire.read_event(asked.name, asked, wire.OF_PUBLISHER)
                self._hear_publisher(asked.name, request, event)
        return wire.Reported(token, known=True)

    def _hear_publisher(self, name: str, request: Request, event: wire.Event) -> None:
        coordination, now = self._coordination, self._clock.now()
        match event:
            case wire.Published():
                version, num_bytes = self._take_manifest(request)
                if version is None:
                    raise WireError("a version was published without a manifest")
                coordination.published(version, now, num_bytes, event.path, name)
            case wire.Sent():
                coordination.sent(event.round, event.num_bytes, now)
            case wire.SendFailed():
                coordination.send_failed(event.round, event.cause[: wire.MAX_TEXT], now, event.begun_s)
            case wire.SeatsChanged():
                coordination.seats_changed(name, event.seats, now)
            case wire.Goodbye():
                coordination.publisher_leaves(now, name)

    def _hear_receiver(self, name: str, event: wire.Event) -> None:
        coordination, now = self._coordination, self._clock.now()
        match event:
            case wire.Attended():
                coordination.attended(name, now)
            case wire.Pinned():
                coordination.pin(name, now)
            case wire.Unpinned():
                coordination.unpin(name, now)
            case wire.Draining():
                coordination.drain(name, now)
            case wire.Goodbye():
                coordination.retire(name, now)
            case wire.Restarted():
                coordination.restarted(name, event.serving, now)
            case wire.LoadEnded():
                coordination.loaded(name, event.number, event.ok, event.error[: wire.MAX_TEXT], now)
            case wire.Progress():
                coordination.progressed(name, event.round, event.num_steps, now)
            case wire.SeatsChanged():
                coordination.seats_changed(name, event.seats, now)
            case wire.Lost():
                coordination.lost(name, event.number, now)
            case wire.Accepted():
                coordination.accepted(name, event.round, now)
            case wire.Verified():
                fault_point("coordinator.verified", event.number)
                is_complete = event.is_complete
                coordination.verified(name, event.round, event.number, now, event.path, is_complete)
            case wire.Failed():
                cause = event.cause[: wire.MAX_TEXT]
                coordination.failed(name, event.round, cause, now, event.num_buckets)

    # --- orders -----------------------------------------------------------------------------------

    def end_turn(self) -> None:
        """Hand out what the requests since the last call have led to; the end of a turn of the server."""
        self._hand_out()
        self._is_status_old = self._is_picture_old = True
        self._tell()

    def _hand_out(self) -> None:
        for round_ in self._coordination.rounds:
            self._longest_round_s = max(self._longest_round_s, self._clock.now() - round_.started)
        if self._newer_token:
            self._answer_outdated()
            return
        orders = self._coordination.take_orders()
        self._journal.note_fences(self._coordination.fences)  # before anyone is told
        for order in orders:
            fault_point(f"coordinator.{order.kind}", getattr(order.what, "number", None))
            self._queues.put(order)
        self._answer_outdated()
        for name, box in self._queues.take_answerable():
            self._answer(name, box)
        for record in self._coordination.take_records():
            self._keep(record)
        current = self._coordination.current
        in_use = {round_.version.number for round_ in self._coordination.rounds}
        forget_versions(self._versions, in_use | ({current.number} if current else set()))

    def _answer_outdated(self) -> None:
        """Polls behind which their peer has sent another one."""
        outdated, self._outdated = self._outdated, []
        for request, name, is_known in outdated:
            orders = wire.Orders(self._coordination.token, is_known, (), self._is_fenced(name))
            send_answer(request, Answer(orders))

    def _answer(self, name: str, box: OrderQueue) -> None:
        assert box.parked is not None
        request, box.parked = box.parked, None
        orders, frames = fill(box, self._versions) if not self._newer_token else ((), [])
        answer = wire.Orders(self._coordination.token, True, orders, self._is_fenced(name))
        send_answer(request, Answer(answer, frames))

    def _is_fenced(self, name: str) -> bool:
        member = self._coordination.members.get(name)
        return member is not None and member.is_fenced

    # --- what is told of it -----------------------------------------------------------------------

    def _keep(self, record: Record) -> None:
        if isinstance(record, BlameRecord):
            log.warning("blamed: %s: %s", record.culprit, record.cause)
        elif isinstance(record, LoadFailureRecord):
            log.warning("%s did not load version %d: %s", record.member, record.number, record.error)
        elif record.cause:
            log.warning(
                "version %d did not reach all: %s, %s", record.number, record.cause, record.causes or "-"
            )
        if isinstance(record, RoundRecord) and (known := self._versions.get(record.number)):
            record = msgspec.structs.replace(record, digest=known.digest, version_bytes=known.num_bytes)
        self._journal.note(record)

    def _tell(self) -> None:
        """Renew what is told of the members, unless that was done a moment ago."""
        if self._is_status_old:
            self._describe_in_time()
        if self._is_picture_old:
            self._journal_members()

    def _journal_members(self, is_forced: bool = False) -> None:
        now = self._clock.now()
        if now < self._picture_at and not is_forced:
            return
        self._is_picture_old = False
        members = members_status(self._coordination)
        self._picture_at = now + PICTURE_S * max(1.0, len(members) / PICTURE_MEMBERS)
        if members == self._last_picture:
            return
        self._last_picture = members
        self._journal.note(MembersRecord(self._version(), members))

    def _version(self) -> tuple[int, int] | None:
        current = self._coordination.current
        return (current.number, current.step) if current else None

    def _describe_in_time(self) -> None:
        now = self._clock.now()
        if now >= self._described_until:
            self._snapshot, self._is_status_old = self._describe(), False
            self._described_until = now + DESCRIBE_S * len(self._coordination.members)

    def _describe(self, state: ServiceState = ServiceState.READY) -> CoordinatorStatus:
        coordination, now = self._coordination, self._clock.now()
        current = coordination.current
        known = self._versions.get(current.number) if current else None
        return CoordinatorStatus(
            state=ServiceState.FENCED if self._newer_token else state,
            address=self._server.address,
            token=coordination.token,
            version=(current.number, current.step) if current else None,
            digest=known.digest if known else "",
            num_bytes=known.num_bytes if known else 0,
            round=coordination.round.phase.value if coordination.round else None,
            rounds=tuple(rounds_status(coordination, now)),
            obstacles=tuple(obstacles_of(coordination)),
            last_round_s=coordination.last_round_s,
            longest_round_s=self._longest_round_s,
            culprit=coordination.culprit,
            counters=dict(coordination.counters) | self._server.tell_counters(),
            members=members_status(coordination, now),
        )
