"""Request and reply between services, over ZMQ ROUTER/DEALER.

A call is one msgpack header (`id`, `op`, arguments) and any number of raw frames; so is its reply.
Every wait has a deadline. A handler may keep a request and answer it later (a long poll), which is
how replicas wait for leases and the learner for a batch without polling.

The server loop
  consumes: requests from its socket          waits for: a message, at most `tick_s`
  unblocked by: a message or the tick         produces: replies; errors of a request go to its sender
Invariant: nothing that arrives ends the loop or runs code; what is malformed is counted and refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq
import zmq.asyncio

from asyncrl import wire
from asyncrl.errors import BY_NAME, AsyncrlError, DeadlineExceeded, RemoteError, WireError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """What a call returned."""

    args: dict[str, Any]
    frames: list[bytes]


@dataclass
class Request:
    """One call that arrived; answer it once, now or later."""

    op: str
    args: dict[str, Any]
    frames: list[bytes]
    client: bytes
    id: int
    _socket: zmq.Socket[bytes] = field(repr=False)
    is_answered: bool = False

    def reply(self, frames: Sequence[wire.Frame] = (), **args: Any) -> None:
        """Send the result."""
        self._send({"id": self.id, "ok": True, "args": args}, frames)

    def fail(self, error: AsyncrlError) -> None:
        """Send an error, which the caller sees raised with the same class."""
        kind = type(error).__name__
        self._send({"id": self.id, "ok": False, "kind": kind, "message": error.message, "hint": error.hint})

    def _send(self, header: dict[str, Any], frames: Sequence[wire.Frame] = ()) -> None:
        assert not self.is_answered, f"request '{self.op}' was answered twice"
        self.is_answered = True
        with contextlib.suppress(zmq.ZMQError):  # the caller is gone; nobody waits for this answer
            self._socket.send_multipart([self.client, wire.pack_header(header), *frames])


class Handler(Protocol):
    """What a service does with requests, in the server's one thread."""

    def handle(self, request: Request) -> None: ...

    def tick(self, now: float) -> None: ...


class Server:
    """The ROUTER side. One thread calls `serve`, which calls the handler.

    Args:
        bind: A ZMQ address; `*` as port takes a free one, see `address`.
    """

    def __init__(self, bind: str = "tcp://127.0.0.1:*") -> None:
        # The process's one context: a context of its own would block the collector until it is closed.
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            message = f"cannot listen on {bind}: {error.strerror}"
            raise AsyncrlError(message, hint="Choose a free port") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.counters: Counter[str] = Counter()

    def serve(self, handler: Handler, stop: threading.Event, tick_s: float = 0.05) -> None:
        """Answer requests until `stop` is set, then close the socket."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        next_tick = time.monotonic()
        try:
            while not stop.is_set():
                if poller.poll(max(0, int((next_tick - time.monotonic()) * 1000))):
                    self._drain(handler)
                if time.monotonic() >= next_tick:
                    handler.tick(time.monotonic())
                    next_tick = time.monotonic() + tick_s
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket; what was sent leaves within 0.2 s."""
        self._socket.close(linger=200)

    def _drain(self, handler: Handler) -> None:
        for _ in range(256):  # then let the tick have its turn
            try:
                message = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dispatch(handler, message)

    def _dispatch(self, handler: Handler, message: list[bytes]) -> None:
        try:
            request = self._parse(message)
        except WireError as error:
            self.counters["malformed"] += 1
            log.warning("refused a malformed message: %s", error)
            return
        self.counters["requests"] += 1
        try:
            handler.handle(request)
        except AsyncrlError as error:
            self._fail(request, error)
        except Exception as error:  # process boundary: one bad request must not end the service
            self.counters["internal_errors"] += 1
            log.exception("the request '%s' failed", request.op)
            self._fail(request, RemoteError(f"'{request.op}' failed: {type(error).__name__}: {error}"))

    def _fail(self, request: Request, error: AsyncrlError) -> None:
        if not request.is_answered:
            request.fail(error)

    def _parse(self, message: list[bytes]) -> Request:
        if len(message) < 2:
            raise WireError("a message without a header")
        fields = wire.unpack_header(message[1])
        return Request(
            op=wire.field(fields, "op", str),
            args=wire.field(fields, "args", dict),
            frames=message[2:],
            client=message[0],
            id=wire.field(fields, "id", int),
            _socket=self._socket,
        )


def _parse_reply(message: list[bytes]) -> tuple[int, Reply | AsyncrlError]:
    fields = wire.unpack_header(message[0])
    call_id = wire.field(fields, "id", int)
    if wire.field(fields, "ok", bool):
        return call_id, Reply(wire.field(fields, "args", dict), message[1:])
    error_class = BY_NAME.get(wire.field(fields, "kind", str), RemoteError)
    return call_id, error_class(wire.field(fields, "message", str), hint=wire.field(fields, "hint", str))


def _late(op: str, address: str, deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"'{op}' at {address} gave no answer within {deadline_s:g} s")


def _connect(socket: zmq.Socket[Any], address: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.connect(address)


class Client:
    """The DEALER side for threads; calls are made one at a time.

    >>> # Client("tcp://127.0.0.1:5555").call("status", deadline_s=1.0).args
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _connect(self._socket, address)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def call(
        self, op: str, frames: Sequence[wire.Frame] = (), deadline_s: float = 10.0, **args: Any
    ) -> Reply:
        """Call `op` and wait for its reply.

        Raises:
            DeadlineExceeded: No answer within `deadline_s`. The service may have acted all the same.
            AsyncrlError: The service's own error, with its class where that is one of ours.
        """
        with self._lock:
            return self._call(op, frames, deadline_s, args)

    def _call(self, op: str, frames: Sequence[wire.Frame], deadline_s: float, args: dict[str, Any]) -> Reply:
        call_id, end = next(self._ids), time.monotonic() + deadline_s
        self._socket.setsockopt(zmq.SNDTIMEO, max(1, int(deadline_s * 1000)))
        try:
            self._socket.send_multipart([wire.pack_header({"id": call_id, "op": op, "args": args}), *frames])
        except zmq.Again:
            raise _late(op, self.address, deadline_s) from None
        while (left_s := end - time.monotonic()) > 0 and self._socket.poll(max(1, int(left_s * 1000))):
            found_id, result = _parse_reply(self._socket.recv_multipart())
            if found_id != call_id:
                continue  # the answer to a call that was given up earlier
            if isinstance(result, AsyncrlError):
                raise result
            return result
        raise _late(op, self.address, deadline_s)

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncClient:
    """The DEALER side for asyncio; any number of calls may be in flight."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _connect(self._socket, address)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(
        self, op: str, frames: Sequence[wire.Frame] = (), deadline_s: float = 10.0, **args: Any
    ) -> Reply:
        """As `Client.call`."""
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        call_id = next(self._ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        header = wire.pack_header({"id": call_id, "op": op, "args": args})
        try:
            async with asyncio.timeout(deadline_s):
                await self._socket.send_multipart([header, *frames])
                return await future
        except TimeoutError as error:
            if isinstance(error, AsyncrlError):
                raise
            raise _late(op, self.address, deadline_s) from None
        finally:
            self._waiting.pop(call_id, None)

    async def _read(self) -> None:
        while True:
            call_id, result = _parse_reply(await self._socket.recv_multipart())
            future = self._waiting.get(call_id)
            if future is None or future.done():
                continue  # the answer to a call that was given up earlier
            if isinstance(result, AsyncrlError):
                future.set_exception(result)
            else:
                future.set_result(result)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._socket.close(linger=0)
