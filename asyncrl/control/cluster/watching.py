"""Notices that a Ray cluster is gone, before Ray ends this process without a word.

waits for: its own pulse of `PULSE_S`      unblocked by: time
Ray gives a driver up 60 s after its control store was last heard, by an exit from C++ that runs no Python.
Invariant: one failed connection is no death; `LOST_AFTER` of them in a row are.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PULSE_S = 1.0
LOST_AFTER = 20
END_S = 10.0
"""For the watching thread to end; it is a daemon, so that one which hangs holds up nobody."""
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors of this process or machine, which tell nothing of who listens."""


@contextmanager
def watching(
    listens: Callable[[], bool], on_death: Callable[[], None], pulse_s: float = PULSE_S
) -> Iterator[None]:
    """Call `on_death` once nothing has listened for `LOST_AFTER` pulses."""
    ended = threading.Event()
    arguments = (listens, on_death, pulse_s, ended)
    thread = threading.Thread(target=_watch, args=arguments, name="cluster-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_S)


def _watch(
    listens: Callable[[], bool], on_death: Callable[[], None], pulse_s: float, ended: threading.Event
) -> None:
    num_silent = 0
    while not ended.wait(pulse_s):
        num_silent = 0 if listens() else num_silent + 1
        if num_silent >= LOST_AFTER:
            on_death()
            return


def is_open(address: str) -> bool:
    """Tell whether something listens at `address`, HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PULSE_S).close()
        return True
    except OSError as error:
        return error.errno in OUT_OF_DESCRIPTORS
