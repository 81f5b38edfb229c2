"""ZMQ as the network of a runtime."""

from __future__ import annotations

from collections import Counter

from asyncrl.core.runtime.interface import Line, Listener
from asyncrl.core.runtime.limits import Limits
from asyncrl.core.sockets.keys import ClientKeys, ServerKeys
from asyncrl.core.sockets.line import ZmqLine
from asyncrl.core.sockets.listener import ZmqListener


class ZmqNetwork:
    """See `asyncrl.core.runtime.interface.Network`. It has no state: all sockets are those of the process."""

    def dealer(self, address: str, keys: ClientKeys | None) -> Line:
        """Return a DEALER that connects to `address`."""
        return ZmqLine(address, keys)

    def router(self, bind: str, keys: ServerKeys | None, limits: Limits, counters: Counter[str]) -> Listener:
        """Return a ROUTER bound to `bind`."""
        return ZmqListener(bind, keys, limits, counters)
