"""Events, locks, queues and tasks of a simulated process (`asyncrl.core.runtime.interface`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.kernel.world import Task, Waiters, World


class SimEvent:
    """See `core.runtime.interface.Event`."""

    def __init__(self, world: World) -> None:
        self._world, self._is_set = world, False
        self._waiters = Waiters(world)
        self._calls: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        self._world.touch()
        return self._is_set

    def set(self) -> None:
        self._world.touch()
        self._is_set = True
        self._waiters.wake()
        while self._calls:
            self._calls.pop(0)()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._world.touch()
        wait_for(self._world, lambda: self._is_set, timeout, self._waiters)
        return self._is_set

    def on_set(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._is_set:
            self.set()


class SimLock:
    """See `core.runtime.interface.Lock`. It is not handed on: who is woken may find it taken again."""

    def __init__(self, world: World) -> None:
        self._world, self._is_held = world, False
        self._waiters = Waiters(world)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._world.is_over:
            return True
        self._world.touch()
        if not blocking and self._is_held:
            return False
        wait_for(self._world, lambda: not self._is_held, None if timeout < 0 else timeout, self._waiters)
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        if not self._world.is_over:
            self._waiters.wake(only_one=True)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimQueue:
    """See `core.runtime.interface.Queue`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._waiters = Waiters(world)

    def put(self, item: Any) -> None:
        self._world.touch()
        self._items.append(item)
        self._waiters.wake(only_one=True)

    def get(self) -> Any:
        self._world.touch()
        wait_for(self._world, lambda: bool(self._items), None, self._waiters)
        return self._items.popleft()


class SimTask:
    """See `core.runtime.interface.Task`."""

    def __init__(self, world: World, task: Task) -> None:
        self._world, self._task = world, task

    def join(self, timeout: float | None = None) -> None:
        self._world.touch()
        wait_for(self._world, lambda: self._task.is_done, timeout, self._task.ended)

    def is_alive(self) -> bool:
        return not self._task.is_done


def wait_for(world: World, is_there: Callable[[], bool], seconds: float | None, *waiters: Waiters) -> None:
    """Wait until `is_there`, which `waiters` are woken for, or for `seconds`."""
    end = None if seconds is None else world.now + seconds
    while not is_there():
        left_s = None if end is None else end - world.now
        if left_s is not None and left_s <= 0.0:
            return
        world.block(left_s, *waiters)
