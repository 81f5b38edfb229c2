"""Whose process listens on a port of this machine: a password must reach no other user's.

Whoever listens where a private Redis did a moment ago, or is about to, would be sent user and password. The
kernel says whose a listening socket is. Linux only; without its table nothing is known and nobody refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

LOOPBACK, LISTENING = "0100007F", "0A"
"""127.0.0.1 and a state, as the table has them."""
TABLE = Path("/proc/net/tcp")


class Listener(NamedTuple):
    """A listening socket: its user, and its number, which no other socket has while it is open."""

    uid: int
    inode: str


def find_listener(port: int) -> Listener | None:
    """Return who listens on a port of 127.0.0.1, None if nobody does.

    Raises:
        OSError: The system has no such table.
    """
    wanted = [f"{LOOPBACK}:{port:04X}", LISTENING]
    rows = (line.split() for line in TABLE.read_text().splitlines()[1:])
    return next((Listener(int(row[7]), row[9]) for row in rows if [row[1], row[3]] == wanted), None)


def find_own_listener(port: int) -> Listener | None:
    """Return the socket of this user that listens on a port of 127.0.0.1; None if nothing can be known.

    Raises:
        ConnectionRefusedError: Nobody listens there, or another user does.
    """
    try:
        found = find_listener(port)
    except OSError:
        return None
    if found is None:
        raise ConnectionRefusedError(f"nobody listens at 127.0.0.1:{port}")
    if found.uid != os.geteuid():
        raise ConnectionRefusedError(f"another user (uid {found.uid}) listens at 127.0.0.1:{port}")
    return found
