"""One connection of a client: its socket, and what libzmq reports of it.

Owns both sockets and whether the connection is up. Must never decide what becomes of a call.
Invariants: a break is told no later than the first answer that comes after it, and for good: a client that
goes on makes a new connection. So no request outlives the connection that it was made for by more than
libzmq takes to connect again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.core.errors import AsyncrlError
from asyncrl.core.sockets.frames import receive_parts, send_parts
from asyncrl.core.sockets.keys import ClientKeys
from asyncrl.core.sockets.options import prepare_client
from asyncrl.core.wire import Frame

_READABLE, _WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
_NOBLOCK = int(zmq.NOBLOCK)
_UP, _BROKEN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
_NUMBERS = itertools.count(1)
"""Names of their own: libzmq's descriptors come again sooner than it frees the name of a closed one."""


class ZmqLine:
    """A DEALER to `address`, used by one thread at a time. See `asyncrl.core.runtime.interface.Line`.

    libzmq's own way of sending only over a connection that is up (`ZMQ_IMMEDIATE`) is not used: at a break
    it ends the pipe even between two parts of a message that is being read, and then aborts the process
    (`Assertion failed: !_more (src/fq.cpp)`).

    Attributes:
        socket: A message sent over it before `is_up` waits, and is lost if the connection is never made.
        reports: Readable when `look` may find something.

    Raises:
        ConfigError: It has no keys, and what it says could be read on its way.
    """

    def __init__(self, address: str, keys: ClientKeys | None) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.reports: zmq.Socket[bytes] = self.socket.get_monitor_socket(
            _UP | _BROKEN, f"inproc://connection-{next(_NUMBERS)}"
        )
        self._poller = _make_poller(self.socket, self.reports)
        self.is_up = self.is_broken = self._needs_room = False
        try:
            prepare_client(self.socket, address, keys)
            self.socket.connect(address)
        except (AsyncrlError, zmq.ZMQError):
            self.close()
            raise
        self.look()  # libzmq wakes whoever watches the descriptor only after a look found nothing

    def look(self) -> None:
        """Take in what libzmq has reported."""
        while not self.reports.closed and int(self.reports.getsockopt(zmq.EVENTS)) & _READABLE:
            event = int(recv_monitor_message(self.reports)["event"])
            if event == _UP:
                self.is_up = True
            elif self.is_up:  # else it was refused before anything could be sent over it
                self.is_broken = True

    def send(self, parts: Sequence[Frame], within_s: float = 0.0) -> bool:
        """Send one message; False if there was no room within `within_s`."""
        try:
            if within_s > 0.0:
                self.socket.setsockopt(zmq.SNDTIMEO, math.ceil(within_s * 1000))
                send_parts(self.socket, parts)
            else:
                send_parts(self.socket, parts, _NOBLOCK)
        except zmq.Again:
            self._needs_room = True
            return False
        self._needs_room = False
        return True

    def receive(self) -> list[Frame] | None:
        """Return the next message that is here, None if there is none."""
        if self.socket.closed:
            return None
        try:
            return receive_parts(self.socket, _NOBLOCK)
        except zmq.Again:
            return None

    def has_news(self) -> bool:
        """Tell what the descriptor may not: it signals changes, and to send or to look takes a signal."""
        wanted = _READABLE | _WRITABLE if self._needs_room else _READABLE
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & wanted)

    def wait(self, seconds: float, *others: Self) -> bool:
        """Wait for something to read on one of the sockets; False after `seconds` without."""
        sockets = [socket for line in (self, *others) for socket in (line.socket, line.reports)]
        poller = _make_poller(*sockets) if others else self._poller
        return bool(poller.poll(math.ceil(max(0.0, seconds) * 1000)))

    def watch(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Let `loop` make `call` when there may be something to read."""
        loop.add_reader(self.socket.fileno(), call)
        loop.add_reader(self.reports.fileno(), call)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what `watch` began."""
        loop.remove_reader(self.socket.fileno())
        loop.remove_reader(self.reports.fileno())

    def close(self) -> None:
        """Drop what was not sent yet. Again it does nothing."""
        if not self.reports.closed:
            self.socket.disable_monitor()
            self.reports.close(linger=0)
        self.socket.close(linger=0)


def _make_poller(*sockets: zmq.Socket[bytes]) -> zmq.Poller:
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, _READABLE)
    return poller
