"""A server's socket: its messages, its allow-list, and the way to wake its thread."""

from __future__ import annotations

import contextlib
import hmac
import math
import socket
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import zmq
from zmq.utils import z85

from asyncrl.core.errors import AsyncrlError, ConfigError
from asyncrl.core.runtime.interface import Arrival
from asyncrl.core.runtime.limits import Limits
from asyncrl.core.sockets.frames import receive_part, send_parts
from asyncrl.core.sockets.keys import Role, ServerKeys
from asyncrl.core.sockets.options import prepare_server
from asyncrl.core.wire import Frame

_NOBLOCK = int(zmq.NOBLOCK)
_READABLE = int(zmq.POLLIN)
REOPEN_S, REOPEN_PAUSE_S = 5.0, 0.01
"""Time that libzmq may take to release the address, and the pause between two attempts to bind it."""
MAX_WAIT_MS = 1 << 30
WAKES_AT_ONCE = 4096


class ZmqListener:
    """A ROUTER at `bind`. See `asyncrl.core.runtime.interface.Listener`."""

    def __init__(self, bind: str, keys: ServerKeys | None, limits: Limits, counters: Counter[str]) -> None:
        self._keys, self._limits, self._counters = keys, limits, counters
        # The process's one context: a context of its own would block the collector until it is closed.
        # With keys there must be one, because libzmq knows one allow-list per context.
        self._own_context = zmq.Context() if keys is not None else None
        self._context = self._own_context or zmq.Context.instance()
        self._gate = Gate(self._context, keys) if keys is not None else None
        self._socket = self._open(bind, 0.0)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._all, self._but_messages = zmq.Poller(), zmq.Poller()
        self._all.register(self._socket, _READABLE)
        for poller in (self._all, self._but_messages):
            poller.register(self._woken, _READABLE)
            if self._gate is not None:
                poller.register(self._gate.socket, _READABLE)

    def wait(self, seconds: float, *, takes_messages: bool = True) -> bool:
        """Wait for messages; answer for the allow-list meanwhile."""
        poller = self._all if takes_messages else self._but_messages
        timeout_ms = None if seconds == math.inf else min(MAX_WAIT_MS, math.ceil(max(0.0, seconds) * 1000))
        ready = dict(poller.poll(timeout_ms))
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(WAKES_AT_ONCE)
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer(self._counters)
        return self._socket in ready

    def wake(self) -> None:
        """End the wait that goes on, or else the next one."""
        with contextlib.suppress(OSError):  # closed, or full of wakes that nobody has heard yet
            self._waker.send(b"\0")

    def receive(self) -> Arrival | None:
        """Return the next message, None if there is none; of one that passes a limit only the first part."""
        try:
            part, known = receive_part(self._socket, _NOBLOCK)
        except zmq.Again:
            return None
        role = Role.SERVICE if self._gate is None else role_of(known)
        caller, parts, num_bytes, is_oversized = bytes(part), list[Frame](), 0, False
        while known.more:
            part, known = receive_part(self._socket)
            num_bytes += len(part)
            if not is_oversized:
                parts.append(part)
                is_oversized = self._limits.are_passed(len(parts), num_bytes)
        if is_oversized:
            del parts[1:]
        return Arrival(caller, parts, is_oversized, role, partial(_answer, self._socket, caller))

    def reopen(self) -> None:
        """Drop all connections and what they have sent so far; the honest come back."""
        self._all.unregister(self._socket)
        self._socket.close(linger=0)
        self._socket = self._open(self.address, REOPEN_S)
        self._all.register(self._socket, _READABLE)

    def close(self) -> None:
        """Close the sockets; what was sent leaves within 0.2 s."""
        self._socket.close(linger=200)
        self._close_gate()
        self._woken.close()
        self._waker.close()

    def _close_gate(self) -> None:
        if self._gate is not None and self._own_context is not None:
            self._gate.socket.close(linger=0)
            self._own_context.term()

    def _open(self, bind: str, within_s: float) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            prepare_server(router, bind, self._limits, self._keys)
        except ConfigError:
            router.close(linger=0)
            raise
        end = time.monotonic() + within_s
        while True:
            try:
                router.bind(bind)
                return router
            except zmq.ZMQError as error:
                if time.monotonic() < end:
                    time.sleep(REOPEN_PAUSE_S)
                    continue
                router.close(linger=0)
                self._close_gate()
                message = f"cannot listen on {bind}: {error.strerror}"
                raise AsyncrlError(message, hint="Choose a free port") from error


def _answer(router: zmq.Socket[bytes], caller: bytes, parts: Sequence[Frame]) -> None:
    with contextlib.suppress(zmq.ZMQError):  # the caller is gone; nobody waits for this answer
        send_parts(router, [caller, *parts])


ENDPOINT = "inproc://zeromq.zap.01"
MAX_ANSWERS = 64
"""Questions answered in a row; then requests have their turn."""


class Gate:
    """The allow-list of one server: answers whether a key may connect (ZAP, ZeroMQ RFC 27), and as what.

    libzmq asks over a socket of the server's own context, so that each server has its own list, and notes the
    answer with every message of the connection, see `role_of`. The server's one thread answers, between
    requests; no thread is added. Invariant: while nobody answers, nobody gets in. Made before the server's
    socket is bound.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._allowed = keys.allowed
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def answer(self, counters: Counter[str]) -> None:
        """Answer the questions that are there; count keys that are refused."""
        for _ in range(MAX_ANSWERS):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            role = self._role(question)
            if role is None:
                counters["refused_keys"] += 1
            code, text = (b"400", b"this key is not on the list") if role is None else (b"200", b"")
            self.socket.send_multipart([b"1.0", question[1], code, text, (role or "").encode(), b""])

    def _role(self, question: list[bytes]) -> Role | None:
        mechanism, credentials = question[5], question[6:]
        if mechanism != b"CURVE" or len(credentials) != 1:
            return None
        key = z85.encode(credentials[0])
        found = [role for one, role in self._allowed.items() if hmac.compare_digest(key, one)]
        return found[0] if found else None


def role_of(message: zmq.Frame) -> Role:
    """Return the role of the sender of `message`, a part of a message to a server that has a gate."""
    return Role(str(message.get("User-Id")))
