"""A peer's way to the coordinator, as `weight_sync.liaison` goes it, in two tasks instead of threads.

orders    consumes: orders    waits for: the coordinator     produces: calls of `deliver`
reports   consumes: reports   waits for: a report            produces: events at the coordinator
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncrl.core.errors import AsyncrlError, DeadlineExceeded, FencedError
from asyncrl.core.rpc import Reply
from asyncrl.planner.faults.kernel.process import Connection, Process
from asyncrl.planner.faults.kernel.tasks import Bell, Lock
from weight_sync.liaison import CALL_DEADLINE_S, MAX_TRIES, RETRY_S, Introduction, Reset
from weight_sync.protocol.peer import Allegiance, Hearing

COORDINATOR = "weight_sync.0"
Deliver = Callable[[int, str, dict[str, Any], bytes], None]
"""Called with the coordinator's token, the kind of an order, its fields and a manifest's bytes."""


class _Report(NamedTuple):
    event: str
    args: dict[str, Any]
    frames: Sequence[bytes]
    seq: int


class SimulatedLiaison:
    """See the module."""

    def __init__(
        self, process: Process, name: str, introduce: Callable[[], Introduction], deliver: Deliver
    ) -> None:
        self._process, self._introduce, self._deliver = process, introduce, deliver
        self._who = {"name": name, "incarnation": process.name}
        self._born = int(process.now * 1000)
        self._orders, self._sending = Connection(process, COORDINATOR), Connection(process, COORDINATOR)
        self._allegiance = Allegiance()
        self._reports: deque[_Report] = deque()
        self._bell, self._hello_lock = Bell(), Lock()
        self._num_reports = self._num_hellos = 0
        self._poll_s = 1.0
        self._after = self._session = 0
        self._heard_at = process.now
        self._must_say_hello = self._is_acquainted = False
        self.is_fenced = False
        self.counters: Counter[str] = Counter()

    def start(self) -> None:
        """Begin both tasks."""
        self._process.spawn(self._follow_orders())
        self._process.spawn(self._send_reports())

    def report(self, event: str, frames: Sequence[bytes] = (), **args: Any) -> None:
        """Queue an event for the coordinator."""
        self._num_reports += 1
        self._reports.append(_Report(event, args, frames, self._num_reports))
        self._bell.ring()

    @property
    def lost_for_s(self) -> float:
        """Seconds since the coordinator was last heard."""
        return self._process.now - self._heard_at

    def note_pause(self, seconds: float) -> None:
        """A time in which this process did not run is no silence of the coordinator."""
        self._heard_at = min(self._process.now, self._heard_at + seconds)

    async def _follow_orders(self) -> None:
        is_known, session = False, 0
        while True:
            try:
                if is_known and not self._must_say_hello:
                    session = self._session
                    is_known = await self._poll(session)
                else:
                    is_known = False
                    is_known = await self._say_hello(self._orders, session)
            except AsyncrlError:
                self.counters["coordinator_unreachable"] += 1
                self._orders.renew()
                await self._process.sleep(RETRY_S)

    async def _say_hello(self, connection: Connection, session: int) -> bool:
        async with self._hello_lock:
            if session != self._session and not self._must_say_hello:
                return True
            is_welcome = False
            try:
                is_welcome = await self._introduce_itself(connection)
            finally:
                if not is_welcome:
                    self._must_say_hello = True
        if not is_welcome:
            await self._process.sleep(self._poll_s)
        return is_welcome

    async def _introduce_itself(self, connection: Connection) -> bool:
        if self._is_acquainted:
            self._deliver(self._allegiance.token, Reset.kind, {}, b"")
        self._must_say_hello = False
        told = self._num_reports
        card = self._introduce()
        self._num_hellos += 1
        numbers = {"born": self._born, "seq": self._num_hellos, "told": told}
        args = {**self._who, **card.args, "token": self._allegiance.token, **numbers}
        reply = self._heard(await connection.call("hello", card.frames, CALL_DEADLINE_S, **args))
        self._poll_s = reply.args["poll_s"]
        if reply.args.get("outdated"):
            self.counters["hellos_outdated"] += 1
            self._must_say_hello = True
            return True
        self._after, self._session = 0, self._session + 1
        if not reply.args["welcome"]:
            self.is_fenced = True
            self.counters["hellos_refused"] += 1
            return False
        self._is_acquainted = True
        return True

    @property
    def _call_s(self) -> float:
        return min(CALL_DEADLINE_S, 3 * self._poll_s)

    async def _poll(self, session: int) -> bool:
        args: dict[str, Any] = {"after": self._after, "token": self._allegiance.token, **self._who}
        deadline_s = self._poll_s + self._call_s
        reply = self._heard(await self._orders.call("next_order", (), deadline_s, **args))
        if not reply.args["known"]:
            return False
        async with self._hello_lock:
            if session == self._session:  # else these are orders from before the last hello
                self._take_orders(reply)
        return True

    def _take_orders(self, reply: Reply) -> None:
        self.is_fenced = reply.args["fenced"]
        for order in reply.args["orders"]:
            frame = order["frame"]
            manifest = bytes(reply.frames[frame]) if 0 <= frame < len(reply.frames) else b""
            self._deliver(reply.args["token"], order["kind"], order["fields"], manifest)
            self._after = order["seq"]

    async def _send_reports(self) -> None:
        while True:
            if not self._reports:
                await self._bell.next_ring()
                continue
            report = self._reports.popleft()
            for _ in range(MAX_TRIES):
                if await self._try_report(report):
                    break
            else:
                self.counters["lost_reports"] += 1
                self._must_say_hello = True

    async def _try_report(self, report: _Report) -> bool:
        try:
            for _ in range(2):
                session, token = self._session, self._allegiance.token
                args = {"event": report.event, "fields": report.args, "seq": report.seq, "token": token}
                call = self._sending.call("report", report.frames, self._call_s, **args, **self._who)
                if self._heard(await call).args["known"]:
                    return True
                await self._say_hello(self._sending, session)
        except (DeadlineExceeded, FencedError):
            self._sending.renew()
        except AsyncrlError:
            await self._process.sleep(RETRY_S)
        return False

    def _heard(self, reply: Reply) -> Reply:
        token = reply.args["token"]
        if self._allegiance.hear(token) is Hearing.OLDER:
            raise FencedError(f"the coordinator's token {token} is older than {self._allegiance.token}")
        self._heard_at = self._process.now
        return reply
