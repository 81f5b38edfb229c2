"""A simulated world: one heap of events decides what happens next, in one thread of the machine.

Owns virtual time, chance, and the tasks of all processes: each is a greenlet, which runs until it waits.
Invariants: equal seeds give equal traces; a task of a killed process is neither resumed nor closed before
the world ends; a wake-up for a wait that is over wakes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import greenlet

JITTER_S = 2e-5
"""A task that was woken runs up to so much later: which of two runs first is drawn."""
MAX_EVENTS = 150_000
TRACERS: list[Any] = []
"""Of Python, which keeps one for each greenlet: the last is set in each task that begins."""


class Over(BaseException):
    """The world has ended: each wait raises it, so that greenlets unwind. No `except Exception` takes it."""


class Stuck(BaseException):
    """A task runs on without a wait, or a world without an end."""


class Waiters:
    """Tasks that wait for one thing, in the order of their coming."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tasks: dict[Task, int] = {}

    def wake(self, only_one: bool = False) -> None:
        """Wake all of them, or the first."""
        world = self._world
        while self.tasks:
            task = next(iter(self.tasks))
            token = self.tasks.pop(task)
            if token == task.token:
                world.after(world.jitter(), world.resume, task, token, True)
                if only_one:
                    return


class Task:
    """One greenlet of a process.

    Attributes:
        token: Numbers its waits.
        loop: The event loop that runs in it while it is switched away from.
    """

    def __init__(
        self, name: str, process: Process, run: Callable[[], object], hub: greenlet.greenlet
    ) -> None:
        self.name, self.process = name, process
        self.token = 0
        self.is_done = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.ended = Waiters(process.world)
        self._run = run
        self.greenlet = greenlet.greenlet(self._work, parent=hub)

    def _work(self, _: object = None) -> None:
        world = self.process.world
        if TRACERS:
            sys.settrace(TRACERS[-1])
        try:
            self._run()
        except Over:
            pass
        except Stuck:
            raise
        except BaseException as error:
            if not world.is_over:
                world.note_crash(self, error)
        self.is_done = True
        if not world.is_over:
            self.ended.wake()


class Process:
    """A simulated process: its tasks die together, and are stopped together.

    Attributes:
        host: Processes of a host share a clock.
        memory_bytes: It holds.
        fuse: Calls of the runtime that are left until it is killed; None for no such plan.
        at_end: Called when it is killed: what the kernel gives back.
    """

    def __init__(self, world: World, name: str, pid: int, host: str) -> None:
        self.world, self.name, self.pid, self.host = world, name, pid, host
        self.is_alive, self.is_frozen = True, False
        self.memory_bytes = 0
        self.fuse: int | None = None
        self.tasks: list[Task] = []
        self.at_end: list[Callable[[], None]] = []
        self.held: list[tuple[Task, int, bool]] = []
        self.clock_ahead_s = world.clock_of(host)

    def __repr__(self) -> str:
        return f"{self.name}#{self.pid}"

    def kill(self) -> None:
        """End it at once, as SIGKILL: nothing of it is unwound."""
        if not self.is_alive:
            return
        world = self.world
        self.is_alive, self.is_frozen = False, False
        world.note(f"kill {self}")
        for call in self.at_end:
            call()
        for hear in world.on_kill:
            hear(self)
        if world.current is not None and world.current.process is self:
            world.hub.switch()  # for good

    def freeze(self) -> None:
        """Stop it, as SIGSTOP."""
        if self.is_alive:
            self.is_frozen = True
            self.world.note(f"freeze {self}")

    def thaw(self) -> None:
        """Let it go on, as SIGCONT."""
        if self.is_alive and self.is_frozen:
            self.is_frozen = False
            self.world.note(f"thaw {self}")
            held, self.held = self.held, []
            for task, token, is_woken in held:
                self.world.after(self.world.jitter(), self.world.resume, task, token, is_woken)


class World:
    """See the module.

    Args:
        seed: Of everything that is drawn.
        preempts: Share of the calls of a runtime at which another task may run.
        keeps_lines: Keep the lines of the trace, not only their digest.

    Attributes:
        on_kill: Called with each process that is killed.
        on_point: Called with the process, the name and the place of each fault point that is passed.
    """

    def __init__(self, seed: str, preempts: float = 0.0, keeps_lines: bool = False) -> None:
        self.dice, self._ids = random.Random(f"world/{seed}"), random.Random(f"ids/{seed}")
        self.preempts = preempts
        self.now = 0.0
        self.hub = greenlet.getcurrent()
        self.current: Task | None = None
        self.is_over = False
        self.num_events = self.num_switches = 0
        self.on_kill: list[Callable[[Process], None]] = []
        self.on_point: list[Callable[[Process, str, tuple[int | None, ...]], None]] = []
        self.crashes: list[str] = []
        self.lines: list[str] | None = [] if keeps_lines else None
        self._digest = hashlib.sha256()
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_entries, self._num_pids = 0, 1000
        self._tasks: list[Task] = []
        self._clocks: dict[str, float] = {}

    # --- time -------------------------------------------------------------------------------------

    def jitter(self) -> float:
        """Draw how much later a task runs than it could."""
        return self.dice.random() * JITTER_S

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have `call` made in so many virtual seconds."""
        self._num_entries += 1
        entry = (self.now + max(0.0, delay_s), self._num_entries, call, args)
        heapq.heappush(self._agenda, entry)

    def run(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Let happen what is due until then, or until `is_done`."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= until_s and not is_done():
            self.now, _, call, args = heapq.heappop(agenda)
            self.num_events += 1
            if self.num_events > MAX_EVENTS:
                raise Stuck(f"{MAX_EVENTS} events in {self.now:.1f} virtual seconds")
            call(*args)

    def clock_of(self, host: str) -> float:
        """Return how far the clock of a host is ahead of virtual time."""
        if host not in self._clocks:
            self._clocks[host] = random.Random(f"clock/{host}").uniform(10.0, 5_000.0)
        return self._clocks[host]

    def new_id(self) -> str:
        """Return 32 hexadecimal digits."""
        return f"{self._ids.getrandbits(128):032x}"

    # --- trace ------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now:.7f} {text}"
        self._digest.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    def note_crash(self, task: Task, error: BaseException) -> None:
        """Note that a task ended by an error that it let go."""
        for leaf in leaves_of(error):
            frames = traceback.extract_tb(leaf.__traceback__)
            where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "?"
            self.crashes.append(f"{task.process}/{task.name}: {type(leaf).__name__} at {where}: {leaf}")
            self.note(f"crash {self.crashes[-1]}")

    @property
    def trace(self) -> str:
        """Digest of all that has happened."""
        return self._digest.hexdigest()[:16]

    # --- tasks ------------------------------------------------------------------------------------

    def process(self, name: str, host: str = "") -> Process:
        """Return a new process without a task."""
        self._num_pids += 1
        return Process(self, name, self._num_pids, host or name)

    def spawn(self, process: Process, name: str, run: Callable[[], object]) -> Task:
        """Run `run` beside all else."""
        task = Task(name, process, run, self.hub)
        process.tasks.append(task)
        self._tasks.append(task)
        task.token += 1
        self.after(self.jitter(), self.resume, task, task.token, True)
        return task

    def resume(self, task: Task, token: int, is_woken: bool) -> None:
        """Let a task go on from its wait number `token`, unless that is over."""
        process = task.process
        if task.token != token or task.is_done or not process.is_alive:
            return
        if process.is_frozen:
            process.held.append((task, token, is_woken))
            return
        task.token += 1
        self.num_switches += 1
        self.note(f"run {process}/{task.name}")
        self._switch(task, is_woken)

    def _switch(self, task: Task, value: bool) -> None:
        self.current = task
        asyncio._set_running_loop(task.loop)  # asyncio keeps it for the machine's thread
        task.greenlet.switch(value)
        task.loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        self.current = None

    def block(self, seconds: float | None, *waiters: Waiters) -> bool:
        """Wait until one of `waiters` wakes this task; False after `seconds`."""
        if self.is_over:
            raise Over
        task = self.current
        assert task is not None, "only a task can wait"
        task.token += 1
        for one in waiters:
            one.tasks[task] = task.token
        if seconds is not None:
            self.after(seconds, self.resume, task, task.token, False)
        is_woken = bool(self.hub.switch())
        if self.is_over:
            raise Over
        return is_woken

    def touch(self) -> None:
        """Pass a call of a runtime: the process may be killed here, or another task run first."""
        task = self.current
        if task is None or self.is_over:
            return
        process = task.process
        if process.fuse is not None:
            process.fuse -= 1
            if process.fuse < 0:
                process.fuse = None
                process.kill()
        if self.preempts and asyncio._get_running_loop() is None and self.dice.random() < self.preempts:
            self.block(self.dice.random() * 0.002)

    def pass_point(self, name: str, place: tuple[int | None, ...]) -> None:
        """Pass a fault point of production code (`asyncrl.core.runtime.faults.set_hook`)."""
        if self.current is None or self.is_over:
            return
        process = self.current.process
        for hear in self.on_point:
            hear(process, name, place)

    def end(self) -> None:
        """Unwind all greenlets, the dead ones too, so that none runs its `finally` when it is collected."""
        self.is_over = True
        for task in self._tasks:
            if task.is_done or task.greenlet.dead:
                continue
            self.current = task
            asyncio._set_running_loop(task.loop)
            for _ in range(5):
                if task.greenlet.dead:
                    break
                with contextlib.suppress(BaseException):
                    task.greenlet.throw(Over)
            asyncio._set_running_loop(None)
        self.current = None
        self._tasks.clear()
        self._agenda.clear()


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group of errors, or the error."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves_of(inner)
    else:
        yield error
