"""Runtimes of tests: threads and sockets, with something else in place of one part."""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from asyncrl.core.rpc import Limits
from asyncrl.core.runtime.interface import Line, Listener
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.sockets.keys import ClientKeys, ServerKeys
from asyncrl.core.sockets.line import ZmqLine
from asyncrl.core.sockets.listener import ZmqListener

T = TypeVar("T")


class ManualClock:
    """A clock that moves only when it is told to.

    >>> clock = ManualClock()
    >>> clock.advance(2.0)
    >>> clock.now()
    2.0
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        assert seconds >= 0.0, "time does not run backwards"
        self._now += seconds


class ManualRuntime(ThreadRuntime):
    """Its clock moves only when it is told to. What waits for a deadline waits for ever."""

    def __init__(self, now: float = 0.0) -> None:
        super().__init__()
        self._clock = ManualClock(now)
        self.advance = self._clock.advance

    def now(self) -> float:
        return self._clock.now()

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)


class CountingRuntime(ThreadRuntime):
    """Counts, by what was waited for, how often a wait of it ends: a wake-up of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes: Counter[str] = Counter()
        self._network = CountingNetwork(self.wakes)

    @property
    def num_wakes(self) -> int:
        return self.wakes.total()

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Yield what is counted from here to the end of the block, filled in at its end."""
        before, counted = Counter(self.wakes), Counter[str]()
        yield counted
        counted.update(self.wakes - before)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.wakes["sleep"] += 1

    def event(self) -> ThreadEvent:
        return CountingEvent(self.wakes)

    def queue(self) -> Any:
        return CountingQueue(super().queue(), self.wakes)

    def run_async(self, main: Coroutine[Any, Any, T]) -> T:
        def make_loop() -> asyncio.AbstractEventLoop:
            return asyncio.SelectorEventLoop(CountingSelector(self.wakes))

        with asyncio.Runner(loop_factory=make_loop) as runner:
            return runner.run(main)


class CountingEvent(ThreadEvent):
    def __init__(self, wakes: Counter[str]) -> None:
        super().__init__()
        self._wakes = wakes

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(timeout)
        self._wakes["event"] += 1
        return found


class CountingQueue:
    def __init__(self, queue: Any, wakes: Counter[str]) -> None:
        self._queue, self._wakes = queue, wakes
        self.put = queue.put

    def get(self) -> Any:
        found = self._queue.get()
        self._wakes["queue"] += 1
        return found


class CountingSelector(selectors.DefaultSelector):
    def __init__(self, wakes: Counter[str]) -> None:
        super().__init__()
        self._wakes = wakes

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        if timeout is None or timeout > 0:  # else the loop was awake already
            self._wakes["loop"] += 1
        return found


class CountingNetwork:
    def __init__(self, wakes: Counter[str]) -> None:
        self._wakes = wakes

    def dealer(self, address: str, keys: ClientKeys | None) -> Line:
        return CountingLine(address, keys, self._wakes)

    def router(self, bind: str, keys: ServerKeys | None, limits: Limits, counters: Counter[str]) -> Listener:
        return CountingListener(bind, keys, limits, counters, self._wakes)


class CountingLine(ZmqLine):
    def __init__(self, address: str, keys: ClientKeys | None, wakes: Counter[str]) -> None:
        self._wakes = wakes
        super().__init__(address, keys)

    def wait(self, seconds: float, *others: Self) -> bool:
        found = super().wait(seconds, *others)
        self._wakes["line"] += 1
        return found


class CountingListener(ZmqListener):
    def __init__(self, *args: Any) -> None:
        *args, self._wakes = args
        super().__init__(*args)

    def wait(self, seconds: float, *, takes_messages: bool = True) -> bool:
        found = super().wait(seconds, takes_messages=takes_messages)
        self._wakes["listener"] += 1
        return found
