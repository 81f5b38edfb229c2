"""Messages in and out of a socket with as few copies as there can be.

Invariant: a long part that came in goes out again as the very message that it came in; it is never
copied in between, and nobody may change it.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from asyncrl.core.wire import Frame

_MORE = int(zmq.SNDMORE)  # combining the library's flags takes as long as sending a short part
LONG_BYTES = 32 << 10
"""From this length on a part is handed over without a copy; below, a copy is cheaper."""


def send_parts(socket: zmq.Socket[bytes], parts: Sequence[Frame], flags: int = 0) -> None:
    """Send one message. Do not change its long parts afterwards.

    Raises:
        zmq.Again: There is no room, or nobody is connected; nothing was sent.
    """
    last, flags = len(parts) - 1, int(flags)
    for number, part in enumerate(parts):
        now = flags | _MORE if number < last else flags
        if len(part) < LONG_BYTES:
            socket.send(part, now)
        else:
            socket.send(_as_received(part), now, copy=False)


def _as_received(part: Frame) -> Frame | zmq.Frame:
    """Return the message that `part` is all of, if it came in as one: ZMQ sends it on as it is."""
    message: object = part.obj if isinstance(part, memoryview) else None
    return message if isinstance(message, zmq.Frame) and len(message) == len(part) else part


def receive_part(socket: zmq.Socket[bytes], flags: int = 0) -> tuple[Frame, zmq.Frame]:
    """Return the next part, and what ZMQ knows of it: whether the message goes on (`more`), who sent it.

    A long part is a view of what came in, a short one a copy, as ZMQ keeps 8 KiB for each.

    Raises:
        zmq.Again: There is none.
    """
    part = socket.recv(flags, copy=False)
    return (part.bytes if len(part) < LONG_BYTES else part.buffer), part


def receive_parts(socket: zmq.Socket[bytes], flags: int = 0) -> list[Frame]:
    """Return the parts of the next message, see `receive_part`."""
    part, known = receive_part(socket, flags)
    parts = [part]
    while known.more:
        part, known = receive_part(socket)
        parts.append(part)
    return parts
