"""Ports that are kept for processes which listen later.

A port that was found free and let go may be anybody's a moment after: the kernel hands it to the next
outgoing connection, or another run finds it free too. Invariant: a held port is held by nobody else and
given to nobody who does not ask for it by its number, and whoever does, with SO_REUSEADDR as every
TCPStore and ZMQ socket sets it, can listen there.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterator

from asyncrl.core.errors import AsyncrlError

PORTS = range(20_000, 32_000)
"""Below the range from which systems take ports for outgoing connections, and above Ray's."""
TRIES = 50


class HeldPort(contextlib.AbstractContextManager["HeldPort"]):
    """A TCP port of `host`, held until `close`.

    Args:
        number: Of the port; 0 takes a free one.

    Raises:
        OSError: It is in use, if only as held, or `host` is no address of this machine.
    """

    def __init__(self, host: str = "127.0.0.1", number: int = 0) -> None:
        self._socket = socket.socket()
        try:
            self._socket.bind((host, number))
        except OSError:
            self._socket.close()
            raise
        # After binding: with it before, a port that another socket with this option holds looks free.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number: int = self._socket.getsockname()[1]
        self.address = f"{host}:{self.number}"

    def close(self) -> None:
        """Let the port go."""
        self._socket.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def held_row(host: str, num_ports: int) -> Iterator[int]:
    """Hold so many ports of `host` in a row within `PORTS`; yield the first.

    Raises:
        AsyncrlError: There are none, or `host` is no address of this machine.
    """
    for _ in range(TRIES):
        first = random.randrange(PORTS.start, PORTS.stop - num_ports)
        with contextlib.ExitStack() as held:
            try:
                for number in range(first, first + num_ports):
                    held.enter_context(HeldPort(host, number))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise AsyncrlError(
                        f"launcher.host: no service can listen on {host}: {error.strerror}",
                        hint="Name an address of this machine",
                    ) from error
                continue
            yield first
            return
    raise AsyncrlError(
        f"launcher.host: {host} has no {num_ports} free ports in a row from {PORTS.start} to {PORTS.stop}",
        hint="End what listens there",
    )
