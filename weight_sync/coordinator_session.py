"""Coordinator session of one peer (the publisher or a receiver).

Owns the hello, the long poll for orders and the queue of reports; never decides anything.
The order thread
  consumes: orders     waits for: the coordinator, at most `poll_s` and a margin
  unblocked by: an order or the end of the poll     produces: calls of `deliver`
The report thread
  consumes: reports    waits for: a report, the coordinator's answer
  unblocked by: `report`, `stop`                    produces: events at the coordinator
Invariants: orders are delivered in order; one whose delivery was not acknowledged comes again; what a
coordinator with an older fencing token says is not heard.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from asyncrl.core.errors import AsyncrlError, DeadlineExceeded, FencedError, WireError
from asyncrl.core.rpc import Client
from asyncrl.core.rpc.message import Answer, fields_of
from asyncrl.core.runtime.interface import Queue, Runtime, Task
from asyncrl.core.sockets.keys import ClientKeys
from weight_sync.protocol import messages as wire
from weight_sync.protocol.peer import CoordinatorEpoch, EpochCheck

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 3.0
GOODBYE_DEADLINE_S = 0.5
RETRY_S = 0.2
MAX_TRIES = 3
MAX_PAUSE_S = 1.0
"""By which a look at how long the coordinator is lost may be late; more, and this process did not run."""
LOOK_EVERY_S = 0.5
"""While the coordinator is overdue."""
OVERDUE_POLLS = 1.5
"""Polls in which it must have been heard once."""


class Reset(wire.Instruction, frozen=True):
    """An order of this peer to itself, before it says hello again: give up all rounds."""

    kind = "reset"


@dataclass(frozen=True)
class Introduction:
    """Introduction of a peer: its hello, which the session completes, and the manifest of its version."""

    hello: wire.ReceiverHello | wire.PublisherHello
    frames: Sequence[bytes] = ()


@dataclass(frozen=True)
class _Report:
    event: wire.Event
    frames: Sequence[bytes]
    seq: int


Deliver = Callable[[wire.Instruction, bytes], None]
"""Called with what is ordered, and the manifest's bytes (empty unless an offer)."""


class CoordinatorSession:
    """See the module.

    Args:
        address: Of the coordinator.
        name: The peer's name; `incarnation` tells its processes apart.
        introduce: Called for each hello.
        deliver: Called on the order thread.
    """

    def __init__(
        self,
        runtime: Runtime,
        address: str,
        name: str,
        incarnation: str,
        introduce: Callable[[], Introduction],
        deliver: Deliver,
        keys: ClientKeys | None = None,
    ) -> None:
        self._runtime, self._address, self._keys = runtime, address, keys
        self._orders_client, self._reports_client = self._connect(), self._connect()
        self._name, self._incarnation = name, incarnation
        self._started_ms = runtime.wall_ns() // 1_000_000
        self._epoch = CoordinatorEpoch()
        self._hello_seqs, self._num_reports = itertools.count(1), 0
        self._introduce = introduce
        self._deliver = deliver
        self._reports: Queue[_Report | None] = runtime.queue()
        self._report_lock = runtime.lock()
        self._poll_s = 1.0
        self._after, self._session = 0, 0
        self._heard_at = self._look_at = runtime.now()
        self._must_say_hello = runtime.event()
        self._is_acquainted = False
        self._hello_lock = runtime.lock()
        self._stop = runtime.event()
        self._tasks: list[Task] = []
        self.is_fenced = False
        self.counters: Counter[str] = Counter()

    def start(self) -> None:
        """Say hello and go on in two threads."""
        self._tasks.append(self._runtime.spawn("orders", self._follow_orders))
        self._tasks.append(self._runtime.spawn("reports", self._send_reports))

    def report(self, event: wire.Event, frames: Sequence[bytes] = ()) -> None:
        """Queue an event for the coordinator; never blocks."""
        with self._report_lock:
            self._num_reports += 1
            self._reports.put(_Report(event, frames, self._num_reports))

    @property
    def lost_for_s(self) -> float:
        """Seconds since the coordinator was last heard; asked at `look_at`, or before.

        A time in which this process did not run is no silence of the coordinator.
        """
        now = self._runtime.now()
        if (late_s := now - self.look_at) > MAX_PAUSE_S:
            self._heard_at = min(now, self._heard_at + late_s)
        self._look_at = now + LOOK_EVERY_S
        return now - self._heard_at

    @property
    def look_at(self) -> float:
        """Next time to ask `lost_for_s`: when the coordinator is overdue, and from then on often."""
        return max(self._look_at, self._heard_at + OVERDUE_POLLS * self._poll_s)

    def stop(self) -> None:
        """Say goodbye and end both threads within one poll."""
        self._stop.set()
        self._reports.put(None)
        self._say_goodbye()
        for task in self._tasks:
            task.join(self._poll_s + CALL_DEADLINE_S + 1.0)
        self._orders_client.close()
        self._reports_client.close()

    def _say_goodbye(self) -> None:
        client = self._connect()
        try:
            report = self._report_of(wire.Goodbye(), self._num_reports + 1)
            client.ask(wire.REPORT, report, deadline_s=GOODBYE_DEADLINE_S)
        except AsyncrlError as error:
            log.debug("left without goodbye: %s", error)  # the coordinator may have ended before
        finally:
            client.close()

    def _follow_orders(self) -> None:
        is_known, session = False, 0
        while not self._stop.is_set():
            try:
                if is_known and not self._must_say_hello.is_set():
                    session = self._session
                    is_known = self._poll(session)
                else:
                    is_known = False
                    is_known = self._say_hello(self._orders_client, session)
            except Exception as error:  # of any kind, such as no descriptor left: a deaf peer helps nobody
                self.counters["coordinator_unreachable"] += 1
                log.warning("the coordinator does not answer: %s", error)
                self._orders_client = self._connect_anew(self._orders_client)
                self._stop.wait(RETRY_S)

    def _connect(self) -> Client:
        return Client(self._runtime, self._address, self._keys)

    def _connect_anew(self, client: Client) -> Client:
        """A connection to a coordinator that was stopped stays up, and hides the one that replaced it."""
        try:
            anew = self._connect()
        except Exception as error:  # of any kind, as above: the one there is may serve once more
            log.warning("no new connection to the coordinator: %s", error)
            return client
        client.close()
        return anew

    def _say_hello(self, client: Client, session: int) -> bool:
        """Say hello, unless that was done since `session` was read; return whether this peer is known."""
        with self._hello_lock:
            if session != self._session and not self._must_say_hello.is_set():
                return True  # a second hello would end the rounds that the first one has begun
            is_accepted = False
            try:
                is_accepted = self._introduce_itself(client)
            finally:
                if not is_accepted:
                    self._must_say_hello.set()  # or what it was to make good for is never told
        if not is_accepted:
            log.warning("the coordinator knows a newer process of this name, or this one has retired")
            self._stop.wait(self._poll_s)
        return is_accepted

    def _introduce_itself(self, client: Client) -> bool:
        if self._is_acquainted:
            self._deliver(Reset(), b"")
        self._must_say_hello.clear()  # what is lost from here on is not in this introduction
        told = self._num_reports
        info = self._introduce()
        stamp = {
            "token": self._epoch.token,
            "started_ms": self._started_ms,
            "seq": next(self._hello_seqs),
            "told": told,
        }
        hello = msgspec.structs.replace(info.hello, **stamp)
        if isinstance(hello, wire.PublisherHello):
            heard = client.ask(wire.PUBLISHER_HELLO, hello, info.frames, CALL_DEADLINE_S).message
        else:
            heard = client.ask(wire.HELLO, hello, info.frames, CALL_DEADLINE_S).message
        self._hear(heard.token)
        self._poll_s = heard.poll_s
        if heard.outdated:
            self.counters["hellos_outdated"] += 1
            self._must_say_hello.set()  # at once: a later report was read before it
            return True
        self._after, self._session = 0, self._session + 1
        if not heard.accepted:
            self.is_fenced = True
            self.counters["hellos_refused"] += 1
            return False
        self._is_acquainted = True
        return True

    @property
    def _call_s(self) -> float:
        """As long as a peer may be silent: a report that was lost holds up those behind it."""
        return min(CALL_DEADLINE_S, 3 * self._poll_s)

    def _report_of(self, event: wire.Event, seq: int) -> wire.Report:
        return wire.Report(
            name=self._name,
            incarnation=self._incarnation,
            token=self._epoch.token,
            event=event.kind,
            fields=fields_of(event),
            seq=seq,
        )

    def _poll(self, session: int) -> bool:
        """Take the orders of `session`; return False if the coordinator does not know this peer."""
        asked = wire.NextOrder(
            name=self._name, incarnation=self._incarnation, token=self._epoch.token, after=self._after
        )
        found = self._orders_client.ask(wire.NEXT_ORDER, asked, deadline_s=self._poll_s + self._call_s)
        self._hear(found.message.token)
        if not found.message.known:
            return False
        with self._hello_lock:
            if session == self._session:  # else these are orders from before the last hello
                self._take_orders(found)
        return True

    def _take_orders(self, found: Answer[wire.Orders]) -> None:
        self.is_fenced = found.message.fenced
        for order in found.message.orders:
            manifest = bytes(found.frames[order.frame]) if 0 <= order.frame < len(found.frames) else b""
            try:
                self._deliver(wire.read_instruction(order.kind, order.fields), manifest)
            except WireError as error:  # it would come again with each poll, and hold up those behind it
                self.counters["unreadable_orders"] += 1
                log.warning("an order of the coordinator cannot be read: %s", error)
            self._after = order.seq

    def _send_reports(self) -> None:
        while (report := self._reports.get()) is not None and not self._stop.is_set():
            if not any(self._try_report(report) for _ in range(MAX_TRIES)):
                self.counters["lost_reports"] += 1
                self._must_say_hello.set()  # which says all that counts of this peer
                log.warning("the coordinator did not take the report '%s'", report.event.kind)

    def _try_report(self, report: _Report) -> bool:
        if self._stop.is_set():
            return False
        try:
            for _ in range(2):
                session = self._session
                told = self._report_of(report.event, report.seq)
                heard = self._reports_client.ask(wire.REPORT, told, report.frames, self._call_s).message
                self._hear(heard.token)
                if heard.known:
                    return True
                self._say_hello(self._reports_client, session)
        except (DeadlineExceeded, FencedError):
            self.counters["coordinator_unreachable"] += 1
            self._reports_client = self._connect_anew(self._reports_client)
        except AsyncrlError as error:
            log.warning("the coordinator refused the report '%s': %s", report.event.kind, error)
            self._stop.wait(RETRY_S)
        except Exception as error:  # of any kind, such as no descriptor left: a mute peer helps nobody
            self.counters["coordinator_unreachable"] += 1
            log.warning("the report '%s' could not be sent: %s", report.event.kind, error)
            self._stop.wait(RETRY_S)
        return False

    def _hear(self, token: int) -> None:
        """Note that a coordinator has answered; raises FencedError if it is one that was replaced."""
        hearing = self._epoch.hear(token)
        if hearing is EpochCheck.OLDER:
            self.counters["older_coordinators"] += 1
            raise FencedError(f"the coordinator's token {token} is older than {self._epoch.token}")
        if hearing is EpochCheck.NEWER:
            self.counters["newer_coordinators"] += 1
        self._heard_at = self._runtime.now()
