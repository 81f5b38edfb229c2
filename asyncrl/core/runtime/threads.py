"""The runtime of production: threads, the machine's clocks, random ids, ZMQ."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.core.rpc.memory import resident_bytes
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.interface import Event, Line, Listener, Lock, Network, Queue, Task
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


T = TypeVar("T")


class ThreadEvent(threading.Event):
    """An event of threads that can also wake what does not wait for it.

    >>> stop, woken = ThreadEvent(), []
    >>> stop.on_set(lambda: woken.append("server"))
    >>> stop.set()
    >>> woken
    ['server']
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []

    def set(self) -> None:
        """Set it, and make the calls that were left with it."""
        super().set()
        self._call_all()

    def on_set(self, call: Callable[[], None]) -> None:
        """See `asyncrl.core.runtime.interface.Event`."""
        self._calls.append(call)
        if self.is_set():  # perhaps since a moment ago: each call is popped, so made, once
            self._call_all()

    def _call_all(self) -> None:
        while self._calls:
            try:
                call = self._calls.pop(0)
            except IndexError:
                return  # another thread made it
            call()


class ThreadRuntime(SystemClock):
    """See the module and `asyncrl.core.runtime.interface`."""

    def __init__(self) -> None:
        self._network = ZmqNetwork()

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def network(self) -> Network:
        return self._network

    def wall_ns(self) -> int:
        return time.time_ns()

    def new_id(self) -> str:
        return uuid.uuid4().hex

    def resident_bytes(self) -> int:
        return resident_bytes()

    def event(self) -> Event:
        return ThreadEvent()

    def lock(self) -> Lock:
        return threading.Lock()

    def queue(self) -> Queue[Any]:
        return queue.SimpleQueue()

    def spawn(self, name: str, run: Callable[[], object]) -> Task:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def run_async(self, main: Coroutine[Any, Any, T]) -> T:
        try:
            import uvloop  # comes with vLLM, whose own server runs on it too
        except ImportError:
            return asyncio.run(main)
        return uvloop.run(main)
