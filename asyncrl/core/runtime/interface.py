"""The seam between the services and the machine: time, tasks, waits, ids, and the network below the RPC.

A process has one `Runtime`. Its composition root makes it and hands it to all that the process builds;
nothing reads a clock, starts a thread, draws an id or opens a socket in another way
(`tests/setup/lint/test_seam.py`). `threads` beside it is the runtime of production; tests have others.
Invariants: a wait is for an event, with a deadline or without one, and nobody looks in between whether it
has come; every time is `now` of the runtime.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from asyncrl.core.runtime.clock import Clock
from asyncrl.core.runtime.limits import Limits
from asyncrl.core.sockets.keys import ClientKeys, Role, ServerKeys
from asyncrl.core.wire import Frame

T = TypeVar("T")


class Event(Protocol):
    """Something that happens, and can be waited for by any thread. As `threading.Event`."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it is set, at the latest after `timeout` seconds."""

    def on_set(self, call: Callable[[], None]) -> None:
        """Have `call` made once, when this is set, on the thread that sets it; at once if it is set.

        It wakes what cannot wait for two things at a time: a server, an event loop. It must not block.
        """


class Lock(Protocol):
    """Held by one thread at a time. As `threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Queue(Protocol[T]):
    """Values from any thread for one thread, in order."""

    def put(self, item: T) -> None: ...

    def get(self) -> T:
        """Wait for the next value and return it."""


class Task(Protocol):
    """Work that was spawned."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""

    def is_alive(self) -> bool: ...


class Line(Protocol):
    """A client's connection to one address, used by one thread at a time.

    A break is told no later than the first answer after it, and for good: who goes on makes a new line.

    Attributes:
        is_up: A connection came about. What is sent before is lost if none ever does.
        is_broken: It came about, and is lost.
    """

    is_up: bool
    is_broken: bool

    def look(self) -> None:
        """Bring `is_up` and `is_broken` up to date."""

    def send(self, parts: Sequence[Frame], within_s: float = 0.0) -> bool:
        """Send one message, whole or not at all; False if there was no room for it within `within_s`."""

    def receive(self) -> list[Frame] | None:
        """Return the next message that is here, None if there is none."""

    def has_news(self) -> bool:
        """Tell whether a message is here, or the room that the last `send` did not find.

        If neither is, the call of `watch` is made when one comes.
        """

    def wait(self, seconds: float, *others: Self) -> bool:
        """Wait for a message or a change that `look` would find, here or at one of `others` of the same
        network; False after `seconds` without.
        """

    def watch(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Let `loop` make `call` whenever `wait` would have ended, until `unwatch`."""

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None: ...

    def close(self) -> None:
        """Drop what was not sent yet. Again it does nothing."""


@dataclass(frozen=True)
class Arrival:
    """A message that came to a listener.

    Attributes:
        caller: Names the connection that it came over.
        parts: Without those beyond the limits.
        is_oversized: It passed a limit; only its first part is here.
        role: Of the caller, by its key.
        answer: Sends a message back; what cannot be sent any more is dropped.
    """

    caller: bytes
    parts: list[Frame]
    is_oversized: bool
    role: Role
    answer: Callable[[Sequence[Frame]], None]


class Listener(Protocol):
    """A server's end. All but `wake` belongs to one thread.

    Attributes:
        address: Where clients connect, with its port.
    """

    address: str

    def wait(self, seconds: float, *, takes_messages: bool = True) -> bool:
        """Wait until `receive` may find something; False after `seconds`, or earlier after a `wake`.

        Args:
            takes_messages: Without it messages stay where they are, and end no wait.
        """

    def wake(self) -> None:
        """End the wait that goes on, or else the next one. Any thread may call it, and a signal's handler."""

    def receive(self) -> Arrival | None:
        """Return the next message that is here, None if there is none."""

    def reopen(self) -> None:
        """Drop all connections and what they have sent so far, and listen at the same address."""

    def close(self) -> None:
        """Let go of the address; what was sent leaves within 0.2 s. Again it does nothing."""


class Network(Protocol):
    """Carrier of multipart messages, in order, over connections that may break."""

    def dealer(self, address: str, keys: ClientKeys | None) -> Line:
        """Return a line to `address`, before or after somebody listens there.

        Raises:
            ConfigError: It has no keys, and what it says could be read on its way.
        """

    def router(self, bind: str, keys: ServerKeys | None, limits: Limits, counters: Counter[str]) -> Listener:
        """Return a listener at `bind`; `*` as port takes a free one.

        Args:
            counters: `refused_keys` is counted there.

        Raises:
            ConfigError: It has no keys, and another machine could reach it.
            AsyncrlError: The address is taken.
        """


class Runtime(Clock, Protocol):
    """One process's machine. `now` and `sleep` are those of `Clock`.

    Attributes:
        pid: Of the process; names what it leaves to others.
    """

    @property
    def pid(self) -> int: ...

    @property
    def network(self) -> Network: ...

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970, which processes of all hosts can compare roughly."""

    def new_id(self) -> str:
        """Return 32 hexadecimal digits that nobody was given before."""

    def resident_bytes(self) -> int:
        """Return the memory that the process alone holds, 0 if unknown."""

    def event(self) -> Event: ...

    def lock(self) -> Lock: ...

    def queue(self) -> Queue[Any]: ...

    def spawn(self, name: str, run: Callable[[], object]) -> Task:
        """Run `run` beside all else. The process may end before it does."""

    def run_async(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` in an event loop of its own, as `asyncio.run`, and return what it returns."""
