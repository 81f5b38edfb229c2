"""The ROUTER side of a service: one thread that takes requests and sleeps until something is due.

  consumes: requests, calls from other threads       produces: replies; a request's errors go to its sender
  waits for: the same, at most until the handler or the guard of memory wants to be woken
  unblocked by: the same, the end (`stop`)
Invariant: nothing that arrives ends the loop or runs code; what is malformed or over a limit is
counted and refused.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from asyncrl.core.errors import AsyncrlError, NotAllowed, RemoteError, WireError, WrongVersion
from asyncrl.core.rpc.memory import MemoryGuard
from asyncrl.core.rpc.request import Handler, Request, read_request, refuse_version
from asyncrl.core.runtime.interface import Arrival, Event, Runtime
from asyncrl.core.runtime.limits import Limits
from asyncrl.core.sockets.keys import Role, ServerKeys

log = logging.getLogger(__name__)

COMPLAIN_EVERY_S = 1.0
"""A flood of bad messages is a counter, not a full disk."""
MAX_TURN, MAX_TURN_OF_CALLER = 256, 2
"""Messages handled in a row, of all callers and of one; then what is due and the gate have their turn.

Answers may wait for the end of a turn, so that one caller who asks without end would hold up all others.
"""


class Server:
    """One thread calls `serve`, which calls the handler.

    Args:
        runtime: Of the process.
        bind: A ZMQ address; `*` as port takes a free one, see `address`.
        keys: With keys only their allowed clients can connect, encrypted; without, anybody can who
            reaches the address: loopback or a socket file, any other is a ConfigError.
        limits: Of one request.
        generator_ops: Operations allowed to a generator's key; a service's key allows all.

    `counters`: `requests`, `malformed`, `oversized`, `internal_errors`, `refused_keys`, `refused_ops`,
    `reopened`.
    """

    def __init__(
        self,
        runtime: Runtime,
        bind: str = "tcp://127.0.0.1:*",
        keys: ServerKeys | None = None,
        limits: Limits | None = None,
        generator_ops: Collection[str] = (),
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._runtime = runtime
        self._limits = limits or Limits()
        self._generator_ops = frozenset(generator_ops)
        self._delays = Delays()
        self._memory = MemoryGuard(self._limits.memory_bytes, runtime.resident_bytes)
        self._guard_at = runtime.now()
        self._complain_at = 0.0
        self._num_told = 0  # refused keys that are in the log
        self._calls: deque[Callable[[], object]] = deque()
        self._listener = runtime.network.router(bind, keys, self._limits, self.counters)
        self.address: str = self._listener.address

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have `call` made on the server's thread, in order; from any thread. After the end it is dropped."""
        self._calls.append(call)
        self._listener.wake()

    def serve(
        self,
        handler: Handler,
        stop: Event,
        end_turn: Callable[[], None] = lambda: None,
        is_full: Callable[[], bool] = lambda: False,
        takes_messages: Callable[[], bool] = lambda: True,
    ) -> None:
        """Answer requests until `stop` is set, then close the socket.

        Args:
            end_turn: Called when all messages and calls that had come were handled, or as many as a turn has:
                for what is cheaper done once for many.
            is_full: Asked after each message: whether the turn ends here, because its answers are large.
            takes_messages: Asked before each wait: whether messages may be taken from their sockets.
        """
        stop.on_set(self._listener.wake)
        try:
            while not stop.is_set():
                until = min(handler.wake_at(), self._guard_at)
                takes = takes_messages()
                has_come = self._listener.wait(until - self._runtime.now(), takes_messages=takes)
                self._tell_of_refused_keys()
                has_called = self._make_calls()
                if has_come:
                    self._drain(handler, is_full)
                was_full = is_full()
                if has_come or has_called:
                    end_turn()
                now = self._runtime.now()
                if now >= handler.wake_at():
                    handler.tick(now)
                if was_full or now >= self._guard_at:
                    self._guard_memory()
        finally:
            self.close()

    def tell_counters(self) -> Counter[str]:
        """Return the counters by their names in a service's status: `wire/refused_ops`, say."""
        return Counter({f"wire/{name}": count for name, count in self.counters.items()})

    def _tell_of_refused_keys(self) -> None:
        if self.counters["refused_keys"] > self._num_told:
            self._num_told = self.counters["refused_keys"]
            self._complain("refused a connection: its key is none of this start of the run")

    def close(self) -> None:
        """Close the socket; what was sent leaves within 0.2 s."""
        self._listener.close()

    def _make_calls(self) -> bool:
        """Make the calls that are there; return whether there were any."""
        num_calls = len(self._calls)
        for _ in range(num_calls):
            self._calls.popleft()()
        return num_calls > 0

    def _guard_memory(self) -> None:
        """At the limit, drop all connections and what they have sent so far; the honest come back."""
        if self._memory.is_passed():
            self.counters["reopened"] += 1
            log.error(
                "this process grew by more than %d MiB: all connections are dropped",
                self._limits.memory_bytes >> 20,
            )
            self._listener.reopen()
            self._memory.reset()
        self._guard_at = self._runtime.now() + self._memory.pause_s

    def _drain(self, handler: Handler, is_full: Callable[[], bool]) -> None:
        num_of_caller: Counter[bytes] = Counter()
        for _ in range(MAX_TURN):
            arrival = self._listener.receive()
            if arrival is None:
                return
            self._dispatch(handler, arrival)
            num_of_caller[arrival.caller] += 1
            if num_of_caller[arrival.caller] == MAX_TURN_OF_CALLER or is_full():
                return

    def _dispatch(self, handler: Handler, arrival: Arrival) -> None:
        try:
            request = read_request(arrival)
        except WireError as error:
            self.counters["malformed"] += 1
            if isinstance(error, WrongVersion):
                refuse_version(arrival, error)
            self._complain("refused a malformed message: %s", error)
            return
        if arrival.is_oversized:
            self.counters["oversized"] += 1
            request.fail(self._describe_excess(request))
            return
        if arrival.role is Role.GENERATOR and request.op not in self._generator_ops:
            self.counters["refused_ops"] += 1
            self._complain("refused '%s': it was asked with the key of a generator", request.op)
            hint = "A learner of your own uses service_keys.json"
            request.fail(NotAllowed(f"'{request.op}' is not for the key of a generator", hint=hint))
            return
        self.counters["requests"] += 1
        if request.sent_s is not None:
            request.lay_s = self._delays.measure_s(request.client, request.sent_s, self._runtime.now())
        try:
            handler.handle(request)
        except AsyncrlError as error:
            self._fail(request, error)
        except Exception as error:  # process boundary: one bad request must not end the service
            self.counters["internal_errors"] += 1
            self._complain("the request '%s' failed", request.op, exc_info=True)
            self._fail(request, RemoteError(f"'{request.op}' failed: {type(error).__name__}: {error}"))

    def _describe_excess(self, request: Request) -> WireError:
        limits = self._limits
        return WireError(
            f"'{request.op}' has more than {limits.num_parts} parts or {limits.message_bytes} bytes",
            hint="Send smaller messages",
        )

    def _complain(self, text: str, *values: object, exc_info: bool = False) -> None:
        """Log, at most once per `COMPLAIN_EVERY_S`; the counters miss nothing."""
        if self._runtime.now() >= self._complain_at:
            self._complain_at = self._runtime.now() + COMPLAIN_EVERY_S
            log.warning(text, *values, exc_info=exc_info)

    def _fail(self, request: Request, error: AsyncrlError) -> None:
        if not request.is_answered:
            request.fail(error)


WINDOW_S = 30.0
"""Offsets older than two of these are forgotten: clocks drift apart, and one that stood still (of a paused
machine) makes requests look old for so long. While nothing is read, nothing is forgotten."""
MAX_CALLERS = 4096
"""Connections remembered; beyond them the one that spoke first is forgotten."""


@dataclass(slots=True)
class _Quickest:
    """The smallest differences, in seconds, of this window and of the one before."""

    began_s: float
    lately_s: float
    before_s: float


class Delays:
    """Queueing delays of requests before they were read, without a comparison of clocks.

    Each request carries its time of sending by the caller's own clock. The smallest difference between that
    and the server's clock is the clocks' offset plus the quickest transit; any time beyond it is queueing
    delay. Invariant: `measure_s` never returns more than the true delay, so a caller that is reported as
    timed out has timed out. The first request of a connection is taken for the quickest one.
    """

    def __init__(self) -> None:
        self._callers: dict[bytes, _Quickest] = {}

    def measure_s(self, caller: bytes, sent_s: float, now_s: float) -> float:
        """Return how long a request took beyond the quickest one of its caller, in seconds.

        Args:
            caller: Names the connection.
            sent_s: When it was sent, by the caller's monotonic clock.
            now_s: By ours.
        """
        difference_s = now_s - sent_s
        known = self._callers.get(caller)
        if known is None:
            if len(self._callers) >= MAX_CALLERS:
                del self._callers[next(iter(self._callers))]
            self._callers[caller] = _Quickest(now_s, difference_s, difference_s)
            return 0.0
        if now_s - known.began_s > WINDOW_S:
            known.began_s, known.before_s, known.lately_s = now_s, known.lately_s, difference_s
        known.lately_s = min(known.lately_s, difference_s)
        return difference_s - min(known.lately_s, known.before_s)
