"""The coordinator service: carries `protocol.Coordination` over RPC.

Owns who takes part in which round; holds no weights and never touches a transfer.
  consumes: hellos, reports and polls of the publisher and the receivers    waits for: a request or a tick
  unblocked by: the same    produces: orders, as answers to the parked polls
Invariant: an order is kept until its peer acknowledges it with its next poll.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from asyncrl.clock import Clock
from asyncrl.errors import WireError
from asyncrl.keys import ServerKeys
from asyncrl.rpc import Request, Server
from asyncrl.versions import PolicyVersion
from asyncrl.wire import field as wire_field
from weight_sync.memory.manifest import Manifest
from weight_sync.protocol.members import Card, PublisherSeat
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.rounds import Order

log = logging.getLogger(__name__)

TICK_S = 0.02


@dataclass
class _Mailbox:
    """Orders to one peer that it has not acknowledged, and its parked poll."""

    incarnation: str
    last_seq: int = 0
    orders: deque[tuple[int, Order]] = field(default_factory=deque)
    parked: Request | None = None
    parked_until: float = 0.0

    def put(self, order: Order) -> None:
        self.last_seq += 1
        self.orders.append((self.last_seq, order))

    def acknowledge(self, seq: int) -> None:
        while self.orders and self.orders[0][0] <= seq:
            self.orders.popleft()


class CoordinatorService:
    """See the module."""

    def __init__(
        self,
        coordination: Coordination,
        clock: Clock,
        bind: str = "tcp://127.0.0.1:*",
        keys: ServerKeys | None = None,
    ) -> None:
        self._coordination = coordination
        self._clock = clock
        self._server = Server(bind, keys)
        self._mail: dict[str, _Mailbox] = {}
        self._manifests: dict[int, bytes] = {}
        self._snapshot: dict[str, Any] = {**self._describe(), "state": "STARTING"}

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`."""
        self._server.serve(self, stop, TICK_S)

    def status(self) -> dict[str, Any]:
        """Return members, versions, the last round and the counters."""
        return self._snapshot

    def command(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Nothing can be asked of the coordinator but to stop."""
        return {}

    def handle(self, request: Request) -> None:
        """Answer one request; see `liaison.py` for the other side."""
        if request.op == "next_order":
            self._park(request)
        elif request.op == "report":
            self._take_report(request)
        elif request.op == "hello":
            self._welcome(request)
        elif request.op == "status":
            request.reply(**self._snapshot)
        else:
            raise WireError(f"the coordinator knows no '{request.op}'")
        self._flush()

    def tick(self, now: float) -> None:
        """Let deadlines pass and empty polls return."""
        self._coordination.tick(self._clock.now())
        self._flush()
        for name, box in self._mail.items():
            if box.parked is not None and self._clock.now() >= box.parked_until:
                self._answer(name, box)
        self._snapshot = self._describe()

    def _welcome(self, request: Request) -> None:
        args, now = request.args, self._clock.now()
        name, incarnation = wire_field(args, "name", str), wire_field(args, "incarnation", str)
        box = self._mail.get(name)
        if box is not None and box.parked is not None:
            box.parked.reply(known=False, orders=[], fenced=False)
        self._mail[name] = _Mailbox(incarnation)
        abilities = frozenset(wire_field(args, "abilities", list))
        if name == PUBLISHER:
            host, port = wire_field(args, "store_host", str), wire_field(args, "store_port", int)
            seat = PublisherSeat(incarnation, abilities, host, port, now)
            self._coordination.publisher_hello(seat, self._take_manifest(request), now)
        else:
            card = Card(
                name,
                incarnation,
                abilities,
                serving=wire_field(args, "serving", int),
                staged=wire_field(args, "staged", int),
                is_attended=wire_field(args, "attended", bool),
                is_pinned=wire_field(args, "pinned", bool),
            )
            self._coordination.hello(card, now)
        request.reply(poll_s=self._coordination.timing.poll_s)

    def _take_manifest(self, request: Request) -> PolicyVersion | None:
        if not request.frames:
            return None
        data = bytes(request.frames[0])
        version = Manifest.from_bytes(data).version
        self._manifests[version.number] = data
        return version

    def _park(self, request: Request) -> None:
        name = wire_field(request.args, "name", str)
        box = self._mail.get(name)
        if box is None or not self._is_known(request):
            request.reply(known=False, orders=[], fenced=False)
            return
        box.acknowledge(wire_field(request.args, "after", int))
        box.parked = request
        box.parked_until = self._clock.now() + self._coordination.timing.poll_s

    def _is_known(self, request: Request) -> bool:
        name = wire_field(request.args, "name", str)
        incarnation = wire_field(request.args, "incarnation", str)
        return self._coordination.seen(name, incarnation, self._clock.now())

    def _take_report(self, request: Request) -> None:
        if not self._is_known(request):
            request.reply(known=False)
            return
        name = wire_field(request.args, "name", str)
        event, fields = wire_field(request.args, "event", str), wire_field(request.args, "fields", dict)
        if name == PUBLISHER:
            self._hear_publisher(request, event, fields)
        else:
            self._hear_receiver(name, event, fields)
        request.reply(known=True)

    def _hear_publisher(self, request: Request, event: str, fields: dict[str, Any]) -> None:
        now = self._clock.now()
        if event == "published":
            version = self._take_manifest(request)
            if version is None:
                raise WireError("a version was published without a manifest")
            self._coordination.published(version, now)
        elif event == "sent":
            num_bytes = wire_field(fields, "num_bytes", int)
            self._coordination.sent(wire_field(fields, "round", int), num_bytes, now)
        elif event == "send_failed":
            cause = wire_field(fields, "cause", str)
            self._coordination.send_failed(wire_field(fields, "round", int), cause, now)
        else:
            raise WireError(f"the publisher reports '{event}', which means nothing here")

    def _hear_receiver(self, name: str, event: str, fields: dict[str, Any]) -> None:
        coordination, now = self._coordination, self._clock.now()
        plain = {
            "attended": coordination.attended,
            "pin": coordination.pin,
            "unpin": coordination.unpin,
            "drain": coordination.drain,
            "retire": coordination.retire,
        }
        if event in plain:
            plain[event](name, now)
        elif event == "restarted":
            coordination.restarted(name, wire_field(fields, "serving", int), now)
        elif event == "loaded":
            number, is_ok = wire_field(fields, "number", int), wire_field(fields, "ok", bool)
            coordination.loaded(name, number, is_ok, wire_field(fields, "error", str), now)
        else:
            self._hear_of_round(name, event, fields, now)

    def _hear_of_round(self, name: str, event: str, fields: dict[str, Any], now: float) -> None:
        round_id = wire_field(fields, "round", int)
        if event == "accepted":
            self._coordination.accepted(name, round_id, now)
        elif event == "verified":
            self._coordination.verified(name, round_id, wire_field(fields, "number", int), now)
        elif event == "failed":
            self._coordination.failed(name, round_id, wire_field(fields, "cause", str), now)
        else:
            raise WireError(f"{name} reports '{event}', which means nothing here")

    def _flush(self) -> None:
        for order in self._coordination.take_orders():
            box = self._mail.get(order.to)
            if box is not None:
                box.put(order)
        for name, box in self._mail.items():
            if box.parked is not None and box.orders:
                self._answer(name, box)
        self._forget_manifests()

    def _answer(self, name: str, box: _Mailbox) -> None:
        assert box.parked is not None
        request, box.parked = box.parked, None
        frames: list[bytes] = []
        orders = []
        for seq, order in box.orders:
            frame = -1
            if order.kind == "offer" and order.fields["number"] in self._manifests:
                frame = len(frames)
                frames.append(self._manifests[order.fields["number"]])
            orders.append({"seq": seq, "kind": order.kind, "fields": order.fields, "frame": frame})
        member = self._coordination.members.get(name)
        request.reply(frames, known=True, orders=orders, fenced=member is not None and member.is_fenced)

    def _forget_manifests(self) -> None:
        current, round_ = self._coordination.current, self._coordination.round
        keep = {current.number if current else 0, round_.version.number if round_ else 0}
        for number in set(self._manifests) - keep:
            del self._manifests[number]

    def _describe(self) -> dict[str, Any]:
        coordination, now = self._coordination, self._clock.now()
        current = coordination.current
        return {
            "state": "RUNNING",
            "address": self._server.address,
            "version": [current.number, current.step] if current else None,
            "round": coordination.round.phase.value if coordination.round else None,
            "last_round_s": coordination.last_round_s,
            "culprit": coordination.culprit,
            "counters": dict(coordination.counters),
            "members": {
                member.name: {
                    "state": member.state.value,
                    "version": member.serving,
                    "staged": member.staged or 0,
                    "fenced": member.is_fenced,
                    "pinned": member.is_pinned,
                    "last_round_s": member.last_round_s,
                    "silent_s": round(now - member.last_seen, 3),
                    "error": member.last_error,
                }
                for member in coordination.members.values()
            },
        }
