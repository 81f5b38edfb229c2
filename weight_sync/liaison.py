"""Keeps one peer (the publisher or a receiver) in touch with the coordinator.

Owns the hello, the long poll for orders and the queue of reports; never decides anything.
The order thread
  consumes: orders     waits for: the coordinator, at most `poll_s` and a margin
  unblocked by: an order or the end of the poll     produces: calls of `deliver`
The report thread
  consumes: reports    waits for: a report, the coordinator's answer
  unblocked by: `report`, `stop`                    produces: events at the coordinator
Invariant: orders are delivered in order; one whose delivery was not acknowledged comes again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl import wire
from asyncrl.errors import AsyncrlError, DeadlineExceeded
from asyncrl.keys import ClientKeys
from asyncrl.rpc import Client, Reply

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 3.0
RETRY_S = 0.2
MAX_TRIES = 3


@dataclass(frozen=True)
class Introduction:
    """What a peer says of itself in its hello."""

    args: dict[str, Any]
    frames: Sequence[bytes] = ()


@dataclass(frozen=True)
class _Report:
    event: str
    args: dict[str, Any]
    frames: Sequence[bytes]


Deliver = Callable[[str, dict[str, Any], bytes], None]
"""Called with the kind of an order, its fields, and the manifest's bytes (empty unless an offer)."""


class Liaison:
    """See the module.

    Args:
        address: Of the coordinator.
        name: The peer's name; `incarnation` tells its processes apart.
        introduce: Called for each hello.
        deliver: Called on the order thread.
    """

    def __init__(
        self,
        address: str,
        name: str,
        incarnation: str,
        introduce: Callable[[], Introduction],
        deliver: Deliver,
        keys: ClientKeys | None = None,
    ) -> None:
        self._orders_client, self._reports_client = Client(address, keys), Client(address, keys)
        self._who: dict[str, Any] = {"name": name, "incarnation": incarnation}
        self._introduce = introduce
        self._deliver = deliver
        self._reports: queue.Queue[_Report] = queue.Queue()
        self._poll_s = 1.0
        self._after = 0
        self._heard_at = time.monotonic()
        self._hello_lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow_orders, name="orders", daemon=True),
            threading.Thread(target=self._send_reports, name="reports", daemon=True),
        ]
        self.is_fenced = False
        self.counters: Counter[str] = Counter()

    def start(self) -> None:
        """Say hello and go on in two threads."""
        for thread in self._threads:
            thread.start()

    def report(self, event: str, frames: Sequence[bytes] = (), **args: Any) -> None:
        """Queue an event for the coordinator; never blocks."""
        self._reports.put(_Report(event, args, frames))

    @property
    def lost_for_s(self) -> float:
        """Seconds since the coordinator was last heard."""
        return time.monotonic() - self._heard_at

    def stop(self) -> None:
        """End both threads within one poll."""
        self._stop.set()
        for thread in self._threads:
            thread.join(self._poll_s + CALL_DEADLINE_S + 1.0)
        self._orders_client.close()
        self._reports_client.close()

    def _follow_orders(self) -> None:
        is_known = False
        while not self._stop.is_set():
            try:
                is_known = self._poll() if is_known else self._say_hello(self._orders_client)
            except AsyncrlError as error:
                self.counters["coordinator_unreachable"] += 1
                log.warning("the coordinator does not answer: %s", error)
                self._stop.wait(RETRY_S)

    def _say_hello(self, client: Client) -> bool:
        with self._hello_lock:
            card = self._introduce()
            args = {**self._who, **card.args}
            reply = self._heard(client.call("hello", card.frames, CALL_DEADLINE_S, **args))
            self._poll_s = wire.field(reply.args, "poll_s", float)
            self._after = 0
        return True

    def _poll(self) -> bool:
        deadline_s = self._poll_s + CALL_DEADLINE_S
        reply = self._heard(
            self._orders_client.call("next_order", deadline_s=deadline_s, after=self._after, **self._who)
        )
        if not wire.field(reply.args, "known", bool):
            return False
        self.is_fenced = wire.field(reply.args, "fenced", bool)
        for order in wire.field(reply.args, "orders", list):
            frame = wire.field(order, "frame", int)
            self._deliver(
                wire.field(order, "kind", str),
                wire.field(order, "fields", dict),
                bytes(reply.frames[frame]) if 0 <= frame < len(reply.frames) else b"",
            )
            self._after = wire.field(order, "seq", int)
        return True

    def _send_reports(self) -> None:
        while not self._stop.is_set():
            try:
                report = self._reports.get(timeout=0.2)
            except queue.Empty:
                continue
            if not any(self._try_report(report) for _ in range(MAX_TRIES)):
                self.counters["lost_reports"] += 1
                log.warning("the coordinator did not take the report '%s'", report.event)

    def _try_report(self, report: _Report) -> bool:
        if self._stop.is_set():
            return False
        args = {**self._who, "event": report.event, "fields": report.args}
        try:
            reply = self._reports_client.call("report", report.frames, CALL_DEADLINE_S, **args)
            if wire.field(self._heard(reply).args, "known", bool):
                return True
            self._say_hello(self._reports_client)
        except DeadlineExceeded:
            self.counters["coordinator_unreachable"] += 1
        except AsyncrlError as error:
            log.warning("the coordinator refused the report '%s': %s", report.event, error)
            self._stop.wait(RETRY_S)
        return False

    def _heard(self, reply: Reply) -> Reply:
        self._heard_at = time.monotonic()
        return reply
