"""Tells a client that its connection broke: what was asked over it will not be answered.

Owns the socket on which libzmq reports. Must never decide what becomes of a call. Invariant: a break is
told once, and no later than the first answer that comes over the connection after it.
"""

from __future__ import annotations

import itertools
from typing import Any

import zmq

_READABLE = int(zmq.POLLIN)
_NUMBERS = itertools.count(1)
"""Names of their own: libzmq's descriptors come again sooner than it frees the name of a closed one."""


class Lifeline:
    """Watches one DEALER. Made before it connects; used by the thread that uses the DEALER."""

    def __init__(self, dealer: zmq.Socket[Any]) -> None:
        self._dealer = dealer
        address = f"inproc://lifeline-{next(_NUMBERS)}"
        self.socket: zmq.Socket[Any] = dealer.get_monitor_socket(int(zmq.EVENT_DISCONNECTED), address)
        self.has_broken()  # libzmq wakes whoever watches the descriptor only after a look found nothing

    def has_broken(self) -> bool:
        """Tell whether the connection broke since the last question."""
        has_broken = False
        while int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE:
            self.socket.recv_multipart()
            has_broken = True
        return has_broken

    def close(self) -> None:
        """Stop watching. Before the DEALER is closed; again it does nothing."""
        if not self.socket.closed:
            self._dealer.disable_monitor()
            self.socket.close(linger=0)
