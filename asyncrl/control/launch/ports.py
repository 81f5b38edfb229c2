"""Ports that are kept for processes which listen later.

A port that was found free and let go may be anybody's a moment after: the kernel hands it to the next
outgoing connection. Invariant: a held port is given to nobody who does not ask for it by its number, and
whoever does, with SO_REUSEADDR as every TCPStore sets it, can listen there.
"""

from __future__ import annotations

import socket
from typing import Self


class HeldPort:
    """A free TCP port of `host`, held until `close`.

    >>> with HeldPort() as port:
    ...     0 < port.number < 65536
    True
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]
        self.address = f"{host}:{self.number}"

    def close(self) -> None:
        """Let the port go."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
