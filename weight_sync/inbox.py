"""Lets other threads hand work to the thread that serves a service's RPC.

Owns the way into the server's thread, so that a service's state has one owner and no locks.
  consumes: calls put by any thread   waits for: nothing; the server's loop drains it
  unblocked by: a `wake` request to the service's own address, at the latest by its next tick
Invariant: what is put runs once, in order, on the server's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from asyncrl.errors import DeadlineExceeded
from asyncrl.keys import ClientKeys
from asyncrl.rpc import Client
from weight_sync.messages import WAKE, Wake

log = logging.getLogger(__name__)

WAKE_DEADLINE_S = 1.0


class Inbox:
    """See the module. `address` is that of the service's own server, which answers `wake` by `drain`."""

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        self._client = Client(address, keys)
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_woken = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, call: Callable[[], object]) -> None:
        """Have `call` run on the server's thread soon. Never called from that thread."""
        self._calls.put(call)
        if self._is_woken.is_set():
            return
        self._is_woken.set()
        with self._lock:
            if self._is_closed:  # a transfer that ends after its service has nobody to tell
                return
            try:
                self._client.ask(WAKE, Wake(), deadline_s=WAKE_DEADLINE_S)
            except DeadlineExceeded:
                log.debug("the server is busy; its tick will find the call")

    def drain(self) -> None:
        """Run what was put, on the server's thread."""
        self._is_woken.clear()
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()

    def close(self) -> None:
        """Wake nobody any more; what is put from now on is not run."""
        with self._lock:
            self._is_closed = True
            self._client.close()
