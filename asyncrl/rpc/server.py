"""The ROUTER side of a service.

The server loop
  consumes: requests from its socket          waits for: a message, at most `tick_s`
  unblocked by: a message or the tick         produces: replies; errors of a request go to its sender
Invariant: nothing that arrives ends the loop or runs code; what is malformed or over a limit is
counted and refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection

import zmq

from asyncrl.errors import AsyncrlError, ConfigError, NotAllowed, RemoteError, WireError, WrongVersion
from asyncrl.keys import Role, ServerKeys
from asyncrl.rpc.delays import Delays
from asyncrl.rpc.frames import receive_part
from asyncrl.rpc.gate import Gate, role_of
from asyncrl.rpc.memory import MemoryGuard
from asyncrl.rpc.request import Handler, Request, read_request, refuse_version
from asyncrl.rpc.sockets import Limits, prepare_server
from asyncrl.wire import Frame

log = logging.getLogger(__name__)

_NOBLOCK = int(zmq.NOBLOCK)
COMPLAIN_EVERY_S = 1.0
"""A flood of bad messages is a counter, not a full disk."""
REOPEN_S = 5.0
MAX_TURN, MAX_TURN_OF_CALLER = 256, 2
"""Messages handled in a row, of all callers and of one; then the tick and the gate have their turn.

Answers may wait for the end of a turn, so that one caller who asks without end would hold up all others.
"""


class Server:
    """One thread calls `serve`, which calls the handler.

    Args:
        bind: A ZMQ address; `*` as port takes a free one, see `address`.
        keys: With keys only their allowed clients can connect, encrypted; without, anybody can who
            reaches the address: loopback or a socket file, any other is a ConfigError.
        limits: What a request may be.
        generator_ops: What a generator's key opens; a service's opens all.

    `counters`: `requests`, `malformed`, `oversized`, `internal_errors`, `refused_keys`, `refused_ops`,
    `reopened`.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:*",
        keys: ServerKeys | None = None,
        limits: Limits | None = None,
        generator_ops: Collection[str] = (),
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._limits = limits or Limits()
        self._generator_ops = frozenset(generator_ops)
        # The process's one context: a context of its own would block the collector until it is closed.
        # With keys there must be one, because libzmq knows one allow-list per context.
        self._own_context = zmq.Context() if keys is not None else None
        self._context = self._own_context or zmq.Context.instance()
        self._keys = keys
        self._gate = Gate(self._context, keys) if keys is not None else None
        self._delays = Delays()
        self._memory = MemoryGuard(self._limits.memory_bytes)
        self._complain_at = 0.0
        self._is_full: Callable[[], bool] = lambda: False
        self._socket: zmq.Socket[bytes] = self._open(bind)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(
        self,
        handler: Handler,
        stop: threading.Event,
        tick_s: float = 0.05,
        end_turn: Callable[[], None] = lambda: None,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        """Answer requests until `stop` is set, then close the socket.

        Args:
            end_turn: Called when all messages that had come were handled, or as many as a turn has: for what
                is cheaper done once for many requests.
            is_full: Asked after each message: whether the turn ends here, because its answers are large.
        """
        self._is_full = is_full
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)
        next_tick = time.monotonic()
        try:
            while not stop.is_set():
                if poller.poll(max(0, int((next_tick - time.monotonic()) * 1000))):
                    self._take_turn(handler, end_turn, poller)
                if time.monotonic() >= next_tick:
                    handler.tick(time.monotonic())
                    self._guard_memory(poller)
                    next_tick = time.monotonic() + tick_s
        finally:
            self.close()

    def _take_turn(self, handler: Handler, end_turn: Callable[[], None], poller: zmq.Poller) -> None:
        self._answer_gate()
        self._drain(handler)
        was_full = self._is_full()
        end_turn()
        if was_full:
            self._guard_memory(poller)

    def _answer_gate(self) -> None:
        if self._gate is None:
            return
        num_refused = self.counters["refused_keys"]
        self._gate.answer(self.counters)
        if self.counters["refused_keys"] > num_refused:
            self._complain("refused a connection: its key is none of this start of the run")

    def tell_counters(self) -> Counter[str]:
        """Return the counters by their names in a service's status: `wire/refused_ops`, say."""
        return Counter({f"wire/{name}": count for name, count in self.counters.items()})

    def close(self) -> None:
        """Close the socket; what was sent leaves within 0.2 s."""
        self._socket.close(linger=200)
        self._close_gate()

    def _close_gate(self) -> None:
        if self._gate is not None and self._own_context is not None:
            self._gate.socket.close(linger=0)
            self._own_context.term()

    def _open(self, bind: str, deadline_s: float = 0.0) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            prepare_server(socket, bind, self._limits, self._keys)
        except ConfigError:
            socket.close(linger=0)
            raise
        end = time.monotonic() + deadline_s
        while True:
            try:
                socket.bind(bind)
                return socket
            except zmq.ZMQError as error:
                if time.monotonic() < end:
                    time.sleep(0.01)
                    continue
                socket.close(linger=0)
                self._close_gate()
                message = f"cannot listen on {bind}: {error.strerror}"
                raise AsyncrlError(message, hint="Choose a free port") from error

    def _guard_memory(self, poller: zmq.Poller) -> None:
        """At the limit, drop all connections and what they have sent so far; the honest come back."""
        if not self._memory.is_passed():
            return
        self.counters["reopened"] += 1
        log.error(
            "this process grew by more than %d MiB: all connections are dropped",
            self._limits.memory_bytes >> 20,
        )
        poller.unregister(self._socket)
        self._socket.close(linger=0)
        self._socket = self._open(self.address, REOPEN_S)
        poller.register(self._socket, zmq.POLLIN)
        self._memory.reset()

    def _drain(self, handler: Handler) -> None:
        num_of_caller: Counter[bytes] = Counter()
        for _ in range(MAX_TURN):
            try:
                message, is_oversized, role = self._receive()
            except zmq.Again:
                return
            self._dispatch(handler, message, is_oversized, role)
            caller = bytes(message[0])
            num_of_caller[caller] += 1
            if num_of_caller[caller] == MAX_TURN_OF_CALLER or self._is_full():
                return

    def _receive(self) -> tuple[list[Frame], bool, Role]:
        """Return the next message, whether it passed a limit, then only its first two parts, and from whom.

        Raises:
            zmq.Again: There is none.
        """
        part, known = receive_part(self._socket, _NOBLOCK)
        role = Role.SERVICE if self._gate is None else role_of(known)
        parts, num_bytes, is_oversized = [part], 0, False
        while known.more:
            part, known = receive_part(self._socket)
            num_bytes += len(part)
            if not is_oversized:
                parts.append(part)
                is_oversized = self._limits.are_passed(len(parts) - 1, num_bytes)
        return (parts[:2] if is_oversized else parts), is_oversized, role

    def _dispatch(self, handler: Handler, message: list[Frame], is_oversized: bool, role: Role) -> None:
        try:
            request = read_request(message, self._socket, role)
        except WireError as error:
            self.counters["malformed"] += 1
            if isinstance(error, WrongVersion):
                refuse_version(message, self._socket, error)
            self._complain("refused a malformed message: %s", error)
            return
        if is_oversized:
            self.counters["oversized"] += 1
            request.fail(self._describe_excess(request))
            return
        if role is Role.GENERATOR and request.op not in self._generator_ops:
            self.counters["refused_ops"] += 1
            self._complain("refused '%s': it was asked with the key of a generator", request.op)
            hint = "A learner of your own uses service_keys.json"
            request.fail(NotAllowed(f"'{request.op}' is not for the key of a generator", hint=hint))
            return
        self.counters["requests"] += 1
        if request.sent_s is not None:
            request.lay_s = self._delays.measure_s(request.client, request.sent_s, time.monotonic())
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
        if time.monotonic() >= self._complain_at:
            self._complain_at = time.monotonic() + COMPLAIN_EVERY_S
            log.warning(text, *values, exc_info=exc_info)

    def _fail(self, request: Request, error: AsyncrlError) -> None:
        if not request.is_answered:
            request.fail(error)
