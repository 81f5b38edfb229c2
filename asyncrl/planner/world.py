"""Discrete-event simulator: virtual clock, network and actors; actors interact only by messages.

Owns the order of events. There are no threads and no wall clock; all chance comes from the seed, so the
same seed makes the same history. Invariants: time never goes back; events of equal time happen
in the order in which they were scheduled; no message reaches a dead actor.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

Args = Mapping[str, Any]
Then = Callable[[Args], None]
"""Callback that receives the reply to a call."""
Observer = Callable[[float, str, Args], None]
ANSWER = "answer"


class Message(NamedTuple):
    """Message between actors. `call`: correlation id of the reply; 0 if none is expected."""

    op: str
    args: Args
    call: int = 0


class Network(Protocol):
    """Delivery model: decides when a message arrives."""

    def deliver(self, src: str, dst: str, message: Message, now: float) -> list[float]:
        """Return after how many seconds each copy arrives: none if it is lost, two if it is doubled."""


class Reliable:
    """A network that loses nothing: every message takes `latency_s`."""

    def __init__(self, latency_s: float = 0.0005) -> None:
        self._delays_s = [latency_s]

    def deliver(self, src: str, dst: str, message: Message, now: float) -> list[float]:
        """Return the one delay."""
        return self._delays_s


class World:
    """Simulator state: virtual time, messages in flight, live actors.

    Attributes:
        now: Virtual seconds.
        network: May be replaced at any time.
        random: Random generator shared by all actors.
        disk: Persistent state by actor name; it survives a kill.
        observers: Called with (time, kind of event, its figures); see `note`.
    """

    def __init__(self, seed: int, network: Network | None = None) -> None:
        self.now = 0.0
        self.network: Network = network or Reliable()
        self.random = random.Random(seed)
        self.actors: dict[str, Actor] = {}
        self.disk: dict[str, Any] = {}
        self.observers: list[Observer] = []
        self.num_events = 0
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._last = 0
        self._calls: dict[int, tuple[Actor, Then]] = {}

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """Make a call at `time`, at once if that is past."""
        self._last += 1
        heapq.heappush(self._agenda, (max(time, self.now), self._last, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Make a call in `delay_s` seconds."""
        self.at(self.now + delay_s, call, *args)

    def start(self, actor: Actor) -> None:
        """Start an actor; kill a running actor of the same name first."""
        self.kill(actor.name)
        self.actors[actor.name] = actor
        self.note("start", name=actor.name)
        actor.begin()

    def kill(self, name: str) -> None:
        """End an actor at once: its memory is lost; `disk` is kept."""
        actor = self.actors.pop(name, None)
        if actor is None:
            return
        actor.is_alive = False
        self.note("kill", name=name)

    def send(self, src: str, dst: str, message: Message) -> None:
        """Send a message; the network decides when each copy arrives, if any does."""
        for delay_s in self.network.deliver(src, dst, message, self.now):
            self.after(delay_s, self._arrive, src, dst, message)

    def call(self, caller: Actor, dst: str, op: str, args: Args, then: Then) -> None:
        """Ask `dst`; `then` gets the answer if the caller still lives."""
        self._last += 1
        self._calls[self._last] = (caller, then)
        self.send(caller.name, dst, Message(op, args, self._last))

    def answer(self, src: str, dst: str, call: int, args: Args) -> None:
        """Answer a call."""
        self.send(src, dst, Message(ANSWER, args, call))

    def note(self, what: str, **figures: Any) -> None:
        """Tell the observers that something happened."""
        for observer in self.observers:
            observer(self.now, what, figures)

    def step(self) -> bool:
        """Let the next event happen; return False if there is none."""
        if not self._agenda:
            return False
        self.now, _, call, args = heapq.heappop(self._agenda)
        self.num_events += 1
        call(*args)
        return True

    def run(self, is_over: Callable[[], bool], until_s: float = float("inf")) -> None:
        """Let time pass until `is_over`, or `until_s`, or nothing is left to happen."""
        while not is_over() and self._agenda and self._agenda[0][0] <= until_s:
            self.step()

    def _arrive(self, src: str, dst: str, message: Message) -> None:
        if message.op == ANSWER:
            caller, then = self._calls.pop(message.call)
            if caller.is_alive:
                then(message.args)
            return
        actor = self.actors.get(dst)
        if actor is not None:
            actor.receive(src, message)


class Actor:
    """One process. It acts only in `begin`, `receive` and callbacks that these pass to `after` and `call`.

    Attributes:
        name: As of the service, "rollout.3".
        incarnation: Number of processes that have had the name, this one included.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        incarnations = world.disk.setdefault("incarnations", {})
        self.incarnation = incarnations[name] = incarnations.get(name, 0) + 1

    def begin(self) -> None:
        """Start to live."""

    def receive(self, src: str, message: Message) -> None:
        """Take in a message: `on_<op>` gets (src, args, call)."""
        getattr(self, "on_" + message.op)(src, message.args, message.call)

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Make a call in `delay_s` seconds, if this process still lives then."""
        self.world.after(delay_s, self._do, call, args)

    def every(self, interval_s: float, call: Callable[[], None]) -> None:
        """Make a call every `interval_s` seconds, the first one interval from here."""

        def turn() -> None:
            call()
            self.after(interval_s, turn)

        self.after(interval_s, turn)

    def call(self, dst: str, op: str, args: Args, then: Then) -> None:
        """Ask another actor."""
        self.world.call(self, dst, op, args, then)

    def tell(self, dst: str, op: str, **args: Any) -> None:
        """Send a message that needs no reply."""
        self.world.send(self.name, dst, Message(op, args))

    def answer(self, dst: str, call: int, **args: Any) -> None:
        """Answer a call."""
        self.world.answer(self.name, dst, call, args)

    def _do(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.is_alive:
            call(*args)
