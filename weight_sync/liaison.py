"""Keeps one peer (the publisher or a receiver) in touch with the coordinator.

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
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl import wire
from asyncrl.errors import AsyncrlError, DeadlineExceeded, FencedError
from asyncrl.keys import ClientKeys
from asyncrl.rpc import Client, Reply
from weight_sync.protocol.peer import Allegiance, Hearing

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 3.0
GOODBYE_DEADLINE_S = 0.5
RETRY_S = 0.2
MAX_TRIES = 3
MAX_PAUSE_S = 1.0
"""Between two questions how long the coordinator is lost; more, and this process did not run."""
RESET = "reset"
"""An order of this peer to itself, before it says hello again: give up all rounds."""


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
    seq: int


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
        self._address, self._keys = address, keys
        self._orders_client, self._reports_client = Client(address, keys), Client(address, keys)
        self._who: dict[str, Any] = {"name": name, "incarnation": incarnation}
        self._born = time.time_ns() // 1_000_000
        self._allegiance = Allegiance()
        self._hello_seqs, self._num_reports = itertools.count(1), 0
        self._introduce = introduce
        self._deliver = deliver
        self._reports: queue.Queue[_Report] = queue.Queue()
        self._report_lock = threading.Lock()
        self._poll_s = 1.0
        self._after, self._session = 0, 0
        self._heard_at = self._asked_at = time.monotonic()
        self._must_say_hello = threading.Event()
        self._is_acquainted = False
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
        with self._report_lock:
            self._num_reports += 1
            self._reports.put(_Report(event, args, frames, self._num_reports))

    @property
    def lost_for_s(self) -> float:
        """Seconds since the coordinator was last heard; asked every tick.

        A time in which this process did not run is no silence of the coordinator.
        """
        now = time.monotonic()
        pause_s, self._asked_at = now - self._asked_at, now
        if pause_s > MAX_PAUSE_S:
            self._heard_at = min(now, self._heard_at + pause_s)
        return now - self._heard_at

    def stop(self) -> None:
        """Say goodbye and end both threads within one poll."""
        self._stop.set()
        self._say_goodbye()
        for thread in self._threads:
            thread.join(self._poll_s + CALL_DEADLINE_S + 1.0)
        self._orders_client.close()
        self._reports_client.close()

    def _say_goodbye(self) -> None:
        client = Client(self._address, self._keys)
        try:
            args = {"event": "goodbye", "fields": {}, "seq": self._num_reports + 1, **self._token()}
            client.call("report", (), GOODBYE_DEADLINE_S, **args, **self._who)
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

    def _connect_anew(self, client: Client) -> Client:
        """A connection to a coordinator that was stopped stays up, and hides the one that replaced it."""
        try:
            anew = Client(self._address, self._keys)
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
            is_welcome = False
            try:
                is_welcome = self._introduce_itself(client)
            finally:
                if not is_welcome:
                    self._must_say_hello.set()  # or what it was to make good for is never told
        if not is_welcome:
            log.warning("the coordinator knows a newer process of this name, or this one has retired")
            self._stop.wait(self._poll_s)
        return is_welcome

    def _introduce_itself(self, client: Client) -> bool:
        if self._is_acquainted:
            self._deliver(RESET, {}, b"")
        self._must_say_hello.clear()  # what is lost from here on is not in this introduction
        told = self._num_reports
        card = self._introduce()
        numbers = {"born": self._born, "seq": next(self._hello_seqs), "told": told}
        args = {**self._who, **card.args, **self._token(), **numbers}
        reply = self._heard(client.call("hello", card.frames, CALL_DEADLINE_S, **args))
        self._poll_s = wire.field(reply.args, "poll_s", float)
        if reply.args.get("outdated", False) is True:
            self.counters["hellos_outdated"] += 1
            self._must_say_hello.set()  # at once: a later report was read before it
            return True
        self._after, self._session = 0, self._session + 1
        if reply.args.get("welcome", True) is not True:
            self.is_fenced = True
            self.counters["hellos_refused"] += 1
            return False
        self._is_acquainted = True
        return True

    @property
    def _call_s(self) -> float:
        """As long as a peer may be silent: a report that was lost holds up those behind it."""
        return min(CALL_DEADLINE_S, 3 * self._poll_s)

    def _token(self) -> dict[str, int]:
        return {"token": self._allegiance.token}

    def _poll(self, session: int) -> bool:
        """Take the orders of `session`; return False if the coordinator does not know this peer."""
        deadline_s = self._poll_s + self._call_s
        args = {"after": self._after, **self._who, **self._token()}
        reply = self._heard(self._orders_client.call("next_order", deadline_s=deadline_s, **args))
        if not wire.field(reply.args, "known", bool):
            return False
        with self._hello_lock:
            if session == self._session:  # else these are orders from before the last hello
                self._take_orders(reply)
        return True

    def _take_orders(self, reply: Reply) -> None:
        self.is_fenced = wire.field(reply.args, "fenced", bool)
        for order in wire.field(reply.args, "orders", list):
            frame = wire.field(order, "frame", int)
            self._deliver(
                wire.field(order, "kind", str),
                wire.field(order, "fields", dict),
                bytes(reply.frames[frame]) if 0 <= frame < len(reply.frames) else b"",
            )
            self._after = wire.field(order, "seq", int)

    def _send_reports(self) -> None:
        while not self._stop.is_set():
            try:
                report = self._reports.get(timeout=0.2)
            except queue.Empty:
                continue
            if not any(self._try_report(report) for _ in range(MAX_TRIES)):
                self.counters["lost_reports"] += 1
                self._must_say_hello.set()  # which says all that counts of this peer
                log.warning("the coordinator did not take the report '%s'", report.event)

    def _try_report(self, report: _Report) -> bool:
        if self._stop.is_set():
            return False
        try:
            for _ in range(2):
                session = self._session
                args = {"event": report.event, "fields": report.args, "seq": report.seq}
                reply = self._reports_client.call(
                    "report", report.frames, self._call_s, **args, **self._who, **self._token()
                )
                if wire.field(self._heard(reply).args, "known", bool):
                    return True
                self._say_hello(self._reports_client, session)
        except (DeadlineExceeded, FencedError):
            self.counters["coordinator_unreachable"] += 1
            self._reports_client = self._connect_anew(self._reports_client)
        except AsyncrlError as error:
            log.warning("the coordinator refused the report '%s': %s", report.event, error)
            self._stop.wait(RETRY_S)
        except Exception as error:  # of any kind, such as no descriptor left: a mute peer helps nobody
            self.counters["coordinator_unreachable"] += 1
            log.warning("the report '%s' could not be sent: %s", report.event, error)
            self._stop.wait(RETRY_S)
        return False

    def _heard(self, reply: Reply) -> Reply:
        """Return the reply; raises FencedError if it is of a coordinator that was replaced."""
        token = wire.field(reply.args, "token", int)
        hearing = self._allegiance.hear(token)
        if hearing is Hearing.OLDER:
            self.counters["older_coordinators"] += 1
            raise FencedError(f"the coordinator's token {token} is older than {self._allegiance.token}")
        if hearing is Hearing.NEWER:
            self.counters["newer_coordinators"] += 1
        self._heard_at = time.monotonic()
        return reply
