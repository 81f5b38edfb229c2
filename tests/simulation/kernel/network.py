"""A network below the RPC layer: lines, listeners, and the connections between them.

Owns each connection's order, delays, breaks and partitions. A connection is as TCP's: what was sent arrives
whole, in order and once, or not at all, and then nothing behind it arrives. An address belongs to whom bound
it last, as a socket file; who had it before keeps the connections that it has.
Invariants: what has arrived can be read after a break; a break is told after what came before it; nothing
is told of a connection to a process that stands still until it was silent for `SILENCE_S`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from asyncrl.core.runtime.interface import Arrival
from asyncrl.core.runtime.limits import Limits
from asyncrl.core.sockets.keys import ClientKeys, Role, ServerKeys
from asyncrl.core.wire import Frame
from tests.simulation.kernel.world import Process, Waiters, World

LATENCY_S = 0.0005
SPIN_S = 0.0002
"""A look costs so much: without it a loop that only looks would stop virtual time."""
RETRY_S, MAX_RETRY_S = 0.1, 2.0
SILENCE_S = 30.0
"""As `asyncrl.core.sockets.options.SILENCE_MS`."""
MAX_UNREAD = 1000
TO_LISTENER, TO_LINE = 0, 1


class Wires:
    """The network between all processes of a world.

    Attributes:
        delay_share, delay_s: So many messages take up to so much longer.
        secret: A part of messages that is of no account to the trace: it differs from machine to machine.
    """

    def __init__(self, world: World, secret: bytes = b"") -> None:
        self.world, self.secret = world, secret
        self.listeners: dict[str, SimListener] = {}
        self.pipes: dict[int, Pipe] = {}
        self.delay_share = self.delay_s = 0.0
        self._parted: Counter[tuple[str, str]] = Counter()
        self._num_pipes = self._num_ports = 0

    def next_port(self) -> int:
        """Return a port that was not given before."""
        self._num_ports += 1
        return 20_000 + self._num_ports

    def next_pipe(self) -> int:
        """Return a number for a connection."""
        self._num_pipes += 1
        return self._num_pipes

    def draw_latency(self) -> float:
        """Return how long the next message takes."""
        dice = self.world.dice
        late_s = (
            dice.random() * self.delay_s if self.delay_share and dice.random() < self.delay_share else 0.0
        )
        return LATENCY_S * (0.5 + dice.random()) + late_s

    def can_reach(self, one: Process, other: Process) -> bool:
        """Tell whether bytes pass between two processes now."""
        return not self._parted[_pair(one.name, other.name)]

    def part(self, one: str, other: str, seconds: float) -> None:
        """Let nothing pass between two services for so long; some of their connections break at once."""
        self._parted[_pair(one, other)] += 1
        self.world.note(f"part {one} {other}")
        for pipe in self._between(one, other):
            if self.world.dice.random() < 0.4:
                pipe.cut()
            else:
                self.world.after(SILENCE_S, pipe.cut_if_silent, self.world.now)
        self.world.after(seconds, self._heal, one, other)

    def _heal(self, one: str, other: str) -> None:
        self._parted[_pair(one, other)] -= 1
        self.world.note(f"heal {one} {other}")
        for pipe in self._between(one, other):
            pipe.let_go()

    def cut(self, name: str, share: float) -> None:
        """Break some of a service's connections."""
        for pipe in list(self.pipes.values()):
            is_its = name in (pipe.line.process.name, pipe.listener.process.name)
            if is_its and self.world.dice.random() < share:
                pipe.cut()

    def _between(self, one: str, other: str) -> list[Pipe]:
        wanted = _pair(one, other)
        ends = ((pipe, pipe.line.process.name, pipe.listener.process.name) for pipe in self.pipes.values())
        return [pipe for pipe, first, second in ends if _pair(first, second) == wanted]


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


class _Flight:
    __slots__ = ("is_lost", "parts")

    def __init__(self, parts: list[bytes]) -> None:
        self.parts, self.is_lost = parts, False


class Pipe:
    """One connection of a line to a listener."""

    def __init__(self, wires: Wires, line: SimLine, listener: SimListener) -> None:
        self.wires, self.world, self.line, self.listener = wires, wires.world, line, listener
        self.number = wires.next_pipe()
        self.caller = b"\0" + self.number.to_bytes(4, "big")
        self.is_up = True
        self.unread: deque[list[bytes]] = deque()
        self._flying: tuple[deque[_Flight], deque[_Flight]] = (deque(), deque())
        self._arrives_at = [0.0, 0.0]
        self._heard_at = self.world.now
        wires.pipes[self.number] = self

    def send(self, way: int, parts: Sequence[Frame]) -> None:
        """Let a message travel; it is lost if the connection is broken."""
        if not self.is_up:
            return
        flight = _Flight([bytes(part) for part in parts])
        self._flying[way].append(flight)
        at = max(self.world.now + self.wires.draw_latency(), self._arrives_at[way])
        self._arrives_at[way] = at
        self.world.after(at - self.world.now, self._arrive, way, flight)

    def _arrive(self, way: int, flight: _Flight) -> None:
        flying = self._flying[way]
        if flight.is_lost or flight not in flying:
            return
        if not self.wires.can_reach(self.line.process, self.listener.process):
            return  # it waits for `let_go`
        while flying:  # one that was held up takes those before it along
            first = flying.popleft()
            if not first.is_lost:
                self._deliver(way, first.parts)
            if first is flight:
                return

    def _deliver(self, way: int, parts: list[bytes]) -> None:
        self._heard_at = self.world.now
        end = self.listener if way == TO_LISTENER else self.line
        if not end.process.is_alive or end.is_closed:
            return
        data = b"\0".join(parts)
        if self.wires.secret:
            data = data.replace(self.wires.secret, b"")
        digest = hashlib.blake2b(data, digest_size=6).hexdigest()
        self.world.note(f"message {self.number}.{way} to {end.process} {len(parts)} {digest}")
        if way == TO_LISTENER and any(len(part) > self.listener.limits.frame_bytes for part in parts):
            self.cut()
        elif way == TO_LISTENER:
            self.unread.append(parts)
            self.listener.pipes[self.number] = self  # also of a caller that is gone
            self.listener.readable.wake()
        else:
            self.line.take(parts)

    def let_go(self) -> None:
        """Deliver what a partition has held up."""
        for way in (TO_LISTENER, TO_LINE):
            if self._flying[way]:
                self.world.after(self.wires.draw_latency(), self._arrive, way, self._flying[way][-1])

    def cut_if_silent(self, since: float) -> None:
        """Break it if nothing has come since then: the heartbeats of ZMQ were not answered."""
        if self._heard_at <= since and not self.wires.can_reach(self.line.process, self.listener.process):
            self.cut()

    def cut(self) -> None:
        """Break the connection: from a drawn message on, what travels is lost."""
        if not self.is_up:
            return
        self.is_up = False
        self.wires.pipes.pop(self.number, None)
        for flying in self._flying:
            kept = self.world.dice.randrange(len(flying) + 1)
            for index, flight in enumerate(flying):
                flight.is_lost = index >= kept
        told_s = max(0.0, self._arrives_at[TO_LINE] - self.world.now) + LATENCY_S
        self.world.after(told_s, self.line.hear_break)
        if not self.unread:
            self.listener.pipes.pop(self.number, None)


class SimLine:
    """See `core.runtime.interface.Line`."""

    def __init__(self, wires: Wires, process: Process, address: str) -> None:
        self._wires, self._world, self.process, self._address = wires, wires.world, process, address
        self.is_up = self.is_broken = self.is_closed = False
        self._pipe: Pipe | None = None
        self._is_connected = self._has_broken = self._needs_room = False
        self._unsent: list[list[bytes]] = []
        self._inbox: deque[list[Frame]] = deque()
        self._news = Waiters(self._world)
        self._watcher: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None
        self._num_tries = 0
        process.at_end.append(self._vanish)
        self._world.after(wires.draw_latency(), self._try)

    def _try(self) -> None:
        """Connect, or try again later."""
        if self.is_closed or not self.process.is_alive:
            return
        listener = self._wires.listeners.get(self._address)
        if (
            listener is None
            or self.process.is_frozen
            or listener.process.is_frozen
            or not self._wires.can_reach(self.process, listener.process)
        ):
            self._num_tries += 1
            wait_s = min(MAX_RETRY_S, RETRY_S * 2 ** min(self._num_tries - 1, 5))
            self._world.after(wait_s * (0.8 + 0.4 * self._world.dice.random()), self._try)
            return
        self._pipe = Pipe(self._wires, self, listener)
        listener.pipes[self._pipe.number] = self._pipe
        self._is_connected = True
        for parts in self._unsent:
            self._pipe.send(TO_LISTENER, parts)
        self._unsent.clear()
        self._tell()

    def hear_break(self) -> None:
        """Learn of a break."""
        if not self.is_closed and self.process.is_alive:
            self._has_broken = True
            self._tell()

    def take(self, parts: list[bytes]) -> None:
        """Take a message in."""
        self._inbox.append(list[Frame](parts))
        self._tell()

    def make_room(self) -> None:
        """Learn that the listener has read."""
        if self._needs_room:
            self._needs_room = False
            self._tell()

    def _tell(self) -> None:
        self._news.wake()
        if self._watcher is not None:
            loop, call = self._watcher
            loop.call_soon_threadsafe(call)

    def _vanish(self) -> None:
        """Close it, or lose it with its process."""
        self.is_closed = True
        if self._pipe is not None:
            self._pipe.cut()

    @property
    def _has_reports(self) -> bool:
        return self._is_connected != self.is_up or self._has_broken != self.is_broken

    def look(self) -> None:
        self.is_up, self.is_broken = self._is_connected, self._has_broken

    def send(self, parts: Sequence[Frame], within_s: float = 0.0) -> bool:
        self._world.touch()
        if self._pipe is None:
            self._unsent.append([bytes(part) for part in parts])
        elif len(self._pipe.unread) >= MAX_UNREAD:
            self._needs_room = True
            return False
        else:
            self._pipe.send(TO_LISTENER, parts)
        return True

    def receive(self) -> list[Frame] | None:
        return self._inbox.popleft() if self._inbox else None

    def has_news(self) -> bool:
        return bool(self._inbox)

    def wait(self, seconds: float, *others: Self) -> bool:
        self._world.touch()
        lines = (self, *others)
        if not any(line._inbox or line._has_reports for line in lines):
            self._world.block(max(seconds, SPIN_S), *(line._news for line in lines))
        return any(line._inbox or line._has_reports for line in lines)

    def watch(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._watcher = (loop, call)
        if self._inbox or self._has_reports:
            loop.call_soon_threadsafe(call)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watcher = None

    def close(self) -> None:
        if not self.is_closed and not self._world.is_over:
            self.process.at_end.remove(self._vanish)
            self._vanish()


class SimListener:
    """See `core.runtime.interface.Listener`. Which connection is read next is drawn."""

    def __init__(self, wires: Wires, process: Process, bind: str, limits: Limits) -> None:
        self._wires, self._world, self.process, self.limits = wires, wires.world, process, limits
        self.address = bind.replace("*", str(wires.next_port()))
        self.pipes: dict[int, Pipe] = {}
        self.readable = Waiters(self._world)
        self.is_closed = self._is_woken = False
        wires.listeners[self.address] = self
        process.at_end.append(self._vanish)

    def _vanish(self) -> None:
        self.is_closed = True
        if self._wires.listeners.get(self.address) is self:
            del self._wires.listeners[self.address]
        for pipe in list(self.pipes.values()):
            pipe.cut()

    @property
    def _has_messages(self) -> bool:
        return any(pipe.unread for pipe in self.pipes.values())

    def wait(self, seconds: float, *, takes_messages: bool = True) -> bool:
        self._world.touch()
        if not self._is_woken and not (takes_messages and self._has_messages):
            left_s = None if seconds == math.inf else max(seconds, SPIN_S)
            self._world.block(left_s, self.readable)
        self._is_woken = False
        return takes_messages and self._has_messages

    def wake(self) -> None:
        if not self._world.is_over:
            self._world.touch()
            self._is_woken = True
            self.readable.wake()

    def receive(self) -> Arrival | None:
        ready = [pipe for pipe in self.pipes.values() if pipe.unread]
        if not ready:
            return None
        pipe = ready[0] if len(ready) == 1 else self._world.dice.choice(ready)
        parts, is_oversized = pipe.unread.popleft(), False
        pipe.line.make_room()
        if not pipe.is_up and not pipe.unread:
            self.pipes.pop(pipe.number, None)
        num_bytes = sum(map(len, parts))
        if self.limits.are_passed(len(parts), num_bytes):
            parts, is_oversized = parts[:1], True
        answer = partial(pipe.send, TO_LINE)
        return Arrival(pipe.caller, list[Frame](parts), is_oversized, Role.SERVICE, answer)

    def reopen(self) -> None:
        for pipe in list(self.pipes.values()):
            pipe.unread.clear()
            pipe.cut()

    def close(self) -> None:
        if not self.is_closed and not self._world.is_over:
            self.process.at_end.remove(self._vanish)
            self._vanish()


class SimNetwork:
    """See `core.runtime.interface.Network`: that of one process."""

    def __init__(self, wires: Wires, process: Process) -> None:
        self._wires, self._process = wires, process

    def dealer(self, address: str, keys: ClientKeys | None) -> SimLine:
        return SimLine(self._wires, self._process, address)

    def router(
        self, bind: str, keys: ServerKeys | None, limits: Limits, counters: Counter[str]
    ) -> SimListener:
        return SimListener(self._wires, self._process, bind, limits)
