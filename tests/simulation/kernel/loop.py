"""An event loop in virtual time: it runs in a task of its process, and dies with it.

Invariant: tasks and futures hash by their number and not by their address, so that production's sets of them
have one order in all runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.kernel.world import Over, Process, Waiters


class NumberedTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is a number."""

    def __init__(self, coro: Any, *, loop: SimLoop, **more: Any) -> None:
        self.number = loop.next_number()
        super().__init__(coro, loop=loop, **more)

    def __hash__(self) -> int:
        return self.number


class NumberedFuture(asyncio.Future):  # type: ignore[type-arg]
    """A future whose hash is a number."""

    def __init__(self, *, loop: SimLoop) -> None:
        self.number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.AbstractEventLoop):
    """See the module."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world
        self._woken = Waiters(self._world)
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_entries = self._last_number = 0
        self._is_running = self._is_closed = False
        self._tasks: list[NumberedTask] = []

    def next_number(self) -> int:
        """Return a number that no task or future of this loop has."""
        self._last_number += 1
        return self._last_number

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run `main` to its end, then cancel what it has left, as `asyncio.run`."""
        self._is_running = True
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main)
            self._run_until_done(task)
            self._cancel_rest()
            return task.result()
        except Over:
            self._forget_all()
            raise
        finally:
            asyncio._set_running_loop(None)
            self._is_running, self._is_closed = False, True

    def _run_until_done(self, *tasks: asyncio.Task[Any]) -> None:
        while not all(task.done() for task in tasks):
            self._turn()

    def _turn(self) -> None:
        """Run what is ready; wait first if nothing is."""
        self._take_timers()
        if not self._ready:
            left_s = self._timers[0][0] - self._world.now if self._timers else None
            self._world.block(left_s, self._woken)
            self._take_timers()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
        if self._ready:
            self._world.block(self._world.jitter(), self._woken)  # other processes run meanwhile

    def _take_timers(self) -> None:
        while self._timers and (self._timers[0][0] <= self._world.now or self._timers[0][2].cancelled()):
            self._ready.append(heapq.heappop(self._timers)[2])

    def _cancel_rest(self) -> None:
        rest = [task for task in self._tasks if not task.done()]
        for task in rest:
            task.cancel()
        self._run_until_done(*rest)

    def _forget_all(self) -> None:
        """Close what is left once the world is over, without a word."""
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    task.get_coro().close()  # type: ignore[union-attr]

    # --- what asyncio asks of a loop --------------------------------------------------------------

    def time(self) -> float:
        return self._world.now + self._process.clock_ahead_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = self.call_soon(callback, *args, context=context)
        if not self._world.is_over:
            self._woken.wake()
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_entries += 1
        due = max(self._world.now, when - self._process.clock_ahead_s)
        heapq.heappush(self._timers, (due, self._num_entries, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task = NumberedTask(coro, loop=self, name=name or f"task-{self._last_number}", context=context)
        self._tasks.append(task)
        if len(self._tasks) > 256:
            self._tasks = [one for one in self._tasks if not one.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run it in a task of the process, as a thread."""
        future = self.create_future()

        def settle(put: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                put(value)

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                self.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                self.call_soon_threadsafe(settle, future.set_result, result)

        self._world.spawn(self._process, "executor", work)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self._world.is_over and not isinstance(error, Over):
            self._world.note(f"loop of {self._process}: {context.get('message')}: {error!r}")
