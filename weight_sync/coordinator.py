"""The coordinator service: carries `protocol.Coordination` over RPC.

Owns who takes part in which round; holds no weights and never touches a transfer.
  consumes: hellos, reports and polls of the publisher and the receivers    waits for: a request or a tick
  unblocked by: the same    produces: orders, as answers to the parked polls; the journal of rounds
Invariants: an order is kept until its peer acknowledges it with its next poll; a coordinator that hears
of a newer one's fencing token gives no more orders.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from pathlib import Path
from typing import Any

from asyncrl.clock import Clock
from asyncrl.errors import FencedError, WireError
from asyncrl.faults import fault_point
from asyncrl.keys import ServerKeys
from asyncrl.obstacle import OBSTACLES
from asyncrl.rpc import Request, Server
from asyncrl.states import ServiceState
from asyncrl.versions import PolicyVersion
from asyncrl.wire import field
from weight_sync.bounds import limits_of
from weight_sync.coordination.callers import (
    read_card,
    read_name,
    read_optional,
    read_reason,
    read_seat,
    read_text,
)
from weight_sync.coordination.journal import Journal
from weight_sync.coordination.mail import KnownVersion, Mailbox, ReportLog, fill, forget_versions
from weight_sync.coordination.picture import picture_members, picture_obstacles, picture_rounds
from weight_sync.memory.manifest import ANY_VERSION, Manifest, VersionBounds
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.records import BlameRecord, LoadFailureRecord, Record, RoundRecord

log = logging.getLogger(__name__)

TICK_S = 0.02
PICTURE_S = 1.0
"""The members are journalled at most so often."""
DESCRIBE_S = 1e-4
"""A status is as old as this, times the members: some twenty times what it costs to describe them."""
GOODBYE = "goodbye"


class CoordinatorService:
    """See the module.

    Args:
        run_dir: Where its rounds are journalled; None keeps no journal.
        bounds: What a version may be.
    """

    def __init__(
        self,
        coordination: Coordination,
        clock: Clock,
        bind: str = "tcp://127.0.0.1:*",
        keys: ServerKeys | None = None,
        run_dir: Path | None = None,
        bounds: VersionBounds = ANY_VERSION,
    ) -> None:
        self._coordination = coordination
        self._clock = clock
        self._server = Server(bind, keys, limits_of(bounds))
        self._bounds = bounds
        self._journal = Journal(run_dir, coordination.token, fences=coordination.fences)
        self._mail: dict[str, Mailbox] = {}
        self._outdated: list[tuple[Request, str, bool]] = []
        self._reports, self._hellos = ReportLog(), ReportLog()
        self._versions: dict[int, KnownVersion] = {}
        self._longest_round_s = 0.0
        self._last_picture: dict[str, Any] = {}
        self._picture_at = 0.0
        self._described_until = 0.0
        self._newer_token = 0
        self._snapshot: dict[str, Any] = {**self._describe(), "state": ServiceState.STARTING}

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`."""
        try:
            self._server.serve(self, stop, TICK_S, self.end_turn)
        finally:
            self._journal_members(is_forced=True)

    def status(self) -> dict[str, Any]:
        """Return members, versions, rounds and counters."""
        return self._snapshot

    def command(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Nothing can be asked of the coordinator but to stop."""
        return {}

    def handle(self, request: Request) -> None:
        """Take one request; see `liaison.py` for the other side. `end_turn` answers what it leads to."""
        if request.op == "status":
            request.reply(**self._snapshot)
            return
        self._check_token(request)
        if request.op == "next_order":
            self._park(request)
        elif request.op == "report":
            self._take_report(request)
        elif request.op == "hello":
            self._welcome(request)
        else:
            raise WireError(f"the coordinator knows no '{request.op}'")

    def tick(self, now: float) -> None:
        """Let deadlines pass and empty polls return."""
        if not self._newer_token:
            self._coordination.tick(self._clock.now())
        self.end_turn()
        for name, box in self._mail.items():
            if box.parked is not None and self._clock.now() >= box.parked_until:
                self._answer(name, box)
        for round_ in self._coordination.rounds:
            self._longest_round_s = max(self._longest_round_s, self._clock.now() - round_.started)
        self._describe_in_time()
        self._journal_members()

    def _check_token(self, request: Request) -> None:
        """Refuse who obeys a newer coordinator: this one was replaced, and must give no more orders."""
        token = field(request.args, "token", int) if "token" in request.args else 0
        self._newer_token = max(self._newer_token, token if token > self._coordination.token else 0)
        if self._newer_token:
            raise FencedError(
                f"this coordinator's token {self._coordination.token} is older than {self._newer_token}",
                hint="Another coordinator has taken over; connect to that one",
            )

    # --- hellos -----------------------------------------------------------------------------------

    def _welcome(self, request: Request) -> None:
        name, incarnation = read_name(request.args), read_text(request.args, "incarnation")
        seq = read_optional(request.args, "seq", int, 0)
        if seq and not self._hellos.is_new(name, incarnation, seq):
            # It was read behind a later one, and its card is old: a member would be thought to serve nothing.
            self._reply(request, poll_s=self._coordination.timing.poll_s, welcome=True)
            return
        if read_optional(request.args, "told", int, sys.maxsize) < self._reports.newest(name, incarnation):
            # A report that was made after its card was read before it: the card would undo what that said.
            self._reply(request, poll_s=self._coordination.timing.poll_s, welcome=True, outdated=True)
            return
        is_welcome = (
            self._seat_publisher(request)
            if name == PUBLISHER
            else self._coordination.hello(read_card(request.args), self._clock.now())
        )
        if is_welcome:
            box = self._mail.get(name)
            if box is not None and box.parked is not None:
                self._outdated.append((box.parked, name, box.incarnation == incarnation))
            self._mail[name] = Mailbox.opened(incarnation, self._coordination.token, box)
        log.info("hello %s %s", name, "" if is_welcome else "(refused)")
        self._reply(request, poll_s=self._coordination.timing.poll_s, welcome=is_welcome)

    def _seat_publisher(self, request: Request) -> bool:
        now = self._clock.now()
        seat = read_seat(request.args, now)
        return self._coordination.publisher_hello(seat, self._take_manifest(request), now)

    def _take_manifest(self, request: Request) -> PolicyVersion | None:
        if not request.frames:
            return None
        data = bytes(request.frames[0])
        manifest = Manifest.from_bytes(data, bounds=self._bounds)
        self._versions[manifest.version.number] = KnownVersion.of(data, manifest)
        return manifest.version

    # --- polls and reports ------------------------------------------------------------------------

    def _park(self, request: Request) -> None:
        name = read_name(request.args)
        box = self._mail.get(name)
        if box is None or not self._is_known(request):
            self._reply(request, known=False, orders=[], fenced=False)
            return
        box.acknowledge(field(request.args, "after", int))
        if box.parked is not None:  # after a pause an old poll may be read behind the one that is waited for
            self._outdated.append((box.parked, name, True))
        box.parked = request
        box.parked_until = self._clock.now() + self._coordination.timing.poll_s

    def _is_known(self, request: Request) -> bool:
        name, incarnation = read_name(request.args), read_text(request.args, "incarnation")
        return self._coordination.seen(name, incarnation, self._clock.now())

    def _take_report(self, request: Request) -> None:
        args = request.args
        if not self._is_known(request):
            self._reply(request, known=False)
            return
        name, event = read_name(args), read_text(args, "event")
        fields = field(args, "fields", dict)
        seq = read_optional(args, "seq", int, 0)
        if not seq or self._reports.is_new(name, field(args, "incarnation", str), seq):
            if name == PUBLISHER:
                self._hear_publisher(request, event, fields)
            else:
                self._hear_receiver(name, event, fields)
        self._reply(request, known=True)

    def _hear_publisher(self, request: Request, event: str, fields: dict[str, Any]) -> None:
        coordination, now = self._coordination, self._clock.now()
        if event == "published":
            version = self._take_manifest(request)
            if version is None:
                raise WireError("a version was published without a manifest")
            coordination.published(version, now)
        elif event == "sent":
            coordination.sent(field(fields, "round", int), field(fields, "num_bytes", int), now)
        elif event == "send_failed":
            cause, begun_s = read_reason(fields, "cause"), read_optional(fields, "begun_s", float, math.inf)
            coordination.send_failed(field(fields, "round", int), cause, now, begun_s)
        elif event == GOODBYE:
            coordination.publisher_leaves(now)
        else:
            raise WireError(f"the publisher reports '{event}', which is unknown here")

    def _hear_receiver(self, name: str, event: str, fields: dict[str, Any]) -> None:
        coordination, now = self._coordination, self._clock.now()
        plain = {
            "attended": coordination.attended,
            "pin": coordination.pin,
            "unpin": coordination.unpin,
            "drain": coordination.drain,
            GOODBYE: coordination.retire,
        }
        if event in plain:
            plain[event](name, now)
        elif event == "restarted":
            coordination.restarted(name, field(fields, "serving", int), now)
        elif event == "loaded":
            number, is_ok = field(fields, "number", int), field(fields, "ok", bool)
            coordination.loaded(name, number, is_ok, read_reason(fields, "error"), now)
        else:
            self._hear_of_round(name, event, fields, now)

    def _hear_of_round(self, name: str, event: str, fields: dict[str, Any], now: float) -> None:
        round_id = field(fields, "round", int)
        if event == "accepted":
            self._coordination.accepted(name, round_id, now)
        elif event == "verified":
            fault_point("coordinator.verified", field(fields, "number", int))
            self._coordination.verified(name, round_id, field(fields, "number", int), now)
        elif event == "failed":
            num_buckets = read_optional(fields, "num_buckets", int, 0)
            self._coordination.failed(name, round_id, read_reason(fields, "cause"), now, num_buckets)
        else:
            raise WireError(f"{name} reports '{event}', which is unknown here")

    # --- orders -----------------------------------------------------------------------------------

    def end_turn(self) -> None:
        """Hand out what the requests since the last call have led to; the end of a turn of the server."""
        if self._newer_token:
            self._answer_outdated()
            return
        orders = self._coordination.take_orders()
        self._journal.note_fences(self._coordination.fences)  # before anyone is told
        for order in orders:
            fault_point(f"coordinator.{order.kind}", order.fields.get("number"))
            box = self._mail.get(order.to)
            if box is not None:
                box.put(order)
        self._answer_outdated()
        for name, box in self._mail.items():
            if box.parked is not None and box.orders:
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
            self._reply(request, known=is_known, orders=[], fenced=self._is_fenced(name))

    def _answer(self, name: str, box: Mailbox) -> None:
        assert box.parked is not None
        request, box.parked = box.parked, None
        orders, frames = fill(box, self._versions) if not self._newer_token else ([], [])
        self._reply(request, frames, known=True, orders=orders, fenced=self._is_fenced(name))

    def _is_fenced(self, name: str) -> bool:
        member = self._coordination.members.get(name)
        return member is not None and member.is_fenced

    def _reply(self, request: Request, frames: list[bytes] | None = None, **args: Any) -> None:
        request.reply(frames or [], token=self._coordination.token, **args)

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
        known = self._versions.get(record.number) if isinstance(record, RoundRecord) else None
        about = {"digest": known.digest, "version_bytes": known.num_bytes} if known else {}
        self._journal.note(record, **about)

    def _journal_members(self, is_forced: bool = False) -> None:
        now = self._clock.now()
        if now < self._picture_at and not is_forced:
            return
        members, self._picture_at = picture_members(self._coordination), now + PICTURE_S
        if members == self._last_picture:
            return
        self._last_picture = members
        self._journal.write({"kind": "members", "version": self._version(), "members": members})

    def _version(self) -> list[int] | None:
        current = self._coordination.current
        return [current.number, current.step] if current else None

    def _describe_in_time(self) -> None:
        now = self._clock.now()
        if now >= self._described_until:
            self._snapshot = self._describe()
            self._described_until = now + DESCRIBE_S * len(self._coordination.members)

    def _describe(self) -> dict[str, Any]:
        coordination, now = self._coordination, self._clock.now()
        current = coordination.current
        known = self._versions.get(current.number) if current else None
        members = picture_members(coordination)
        for name, member in coordination.members.items():
            members[name]["silent_s"] = round(now - member.last_seen, 3)
        return {
            "state": ServiceState.FENCED if self._newer_token else ServiceState.READY,
            "address": self._server.address,
            "token": coordination.token,
            "version": self._version(),
            "digest": known.digest if known else "",
            "num_bytes": known.num_bytes if known else 0,
            "round": coordination.round.phase.value if coordination.round else None,
            "rounds": picture_rounds(coordination, now),
            OBSTACLES: picture_obstacles(coordination),
            "last_round_s": coordination.last_round_s,
            "longest_round_s": self._longest_round_s,
            "culprit": coordination.culprit,
            "counters": dict(coordination.counters),
            "members": members,
        }
