"""The supervisor: the real fleet machine, which looks at processes and starts and ends them.

Owns what `asyncrl.control.reconciler` owns: it saves the machine's state before it does what follows from it,
so the next supervisor finds every service. It looks at processes directly, as Ray does, not over the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from asyncrl.control.fleet.machine import FleetMachine, FleetRules
from asyncrl.control.fleet.messages import (
    Begin,
    Cause,
    Drain,
    Effect,
    End,
    Event,
    GiveUp,
    Gone,
    Halted,
    Heard,
    Kill,
    Leave,
    Start,
    Tick,
    Wanted,
)
from asyncrl.control.fleet.saved import SavedMachine, dump, restore
from asyncrl.core.states import ServiceState
from asyncrl.planner.faults.kernel.process import Process
from asyncrl.planner.faults.services.replica import ReplicaProcess
from asyncrl.planner.world import World

PULSE_S = 0.5
RULES = FleetRules(start_deadline_s=60.0, max_replicas=8, silence_s=4.0, long_silence_s=6.0, suspect_s=1.0)


class Crew(Protocol):
    """Who carries out what the machine decides."""

    world: World

    def find(self, service: str) -> Process | None:
        """Return the process that the supervisor knows under the name, dead or alive."""

    def is_seen(self, process: Process) -> bool:
        """Tell whether the supervisor hears of it."""

    def start(self, service: str) -> None:
        """Start a process."""

    def end(self, service: str) -> None:
        """Kill a process, if it can be reached."""

    def drain(self, index: int) -> None:
        """Tell a replica to leave."""

    def known(self) -> list[str]:
        """Return the services that have a process."""


class Supervisor:
    """See the module.

    Attributes:
        given_up: Why the machine gave the run up, or None.
    """

    def __init__(self, crew: Crew, replicas: int) -> None:
        self._crew, self._replicas = crew, replicas
        self._machine: FleetMachine | None = None
        self._saved: SavedMachine | None = None
        self._life = 0
        self.given_up: GiveUp | None = None

    def begin(self) -> None:
        """Start the run, or take it over."""
        self._life += 1
        now = self._crew.world.now
        if self._saved is None:
            self._machine = FleetMachine(RULES, now)
            self._apply(Begin(self._replicas))
        else:
            self._machine = restore(RULES, self._saved, now)
            living, known = set(self._crew.known()), set(self._machine.names)
            for name in sorted(living - known):
                self._crew.end(name)
            self._apply_all(
                Gone(name, "gone: it died while no supervisor ran") for name in sorted(known - living)
            )
        self._crew.world.after(PULSE_S, self._pulse, self._life)

    def die(self) -> None:
        """Forget all but what was saved."""
        self._machine = None
        self._life += 1

    def want(self, replicas: int) -> None:
        """Change how many replicas there are to be."""
        if self._machine is not None:
            self._apply(Wanted(replicas))

    def let_leave(self, index: int) -> None:
        """Let a replica drain; another one takes its place."""
        if self._machine is not None:
            self._apply(Leave(index))

    def _pulse(self, life: int) -> None:
        if life != self._life or self._machine is None:
            return
        found = [self._look(name) for name in self._machine.names]
        events = sorted((one for one in found if one is not None), key=_rank)
        self._apply_all([*events, Tick()])
        self._crew.world.after(PULSE_S, self._pulse, life)

    def _look(self, name: str) -> Event | None:
        process = self._crew.find(name)
        if process is not None and not self._crew.is_seen(process):
            return None
        if process is not None and process.error is not None:
            return Gone(name, f"failed: {type(process.error).__name__}", Cause.ERROR)
        if process is None or not process.is_alive:
            return Gone(name, "gone: was killed")
        if process.is_stopped:
            return Halted(name)
        done = process.num_done if isinstance(process, ReplicaProcess) else getattr(process, "step", 0)
        return Heard(name, ServiceState(process.state), done)

    def _apply_all(self, events: Iterable[Event]) -> None:
        """Apply what was seen at one moment; what a service did that was renewed since, says nothing."""
        renewed: set[str] = set()
        for event in events:
            if getattr(event, "name", None) not in renewed:
                effects = self._apply(event)
                renewed |= {effect.name for effect in effects if isinstance(effect, Start | Kill | End)}

    def _apply(self, event: Event) -> list[Effect]:
        assert self._machine is not None, "it lives"
        effects = self._machine.apply(event, self._crew.world.now)
        self._saved = dump(self._machine)
        for effect in effects:
            self._carry_out(effect)
        return effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Start(name):
                self._crew.start(name)
            case Kill(name) | End(name):
                self._crew.end(name)
            case Drain(index):
                self._crew.drain(index)
            case GiveUp():
                self.given_up = effect


def _rank(event: Event) -> int:
    if not isinstance(event, Gone):
        return 4
    if event.name.startswith("receiver."):
        return 3
    return 1 if event.cause is Cause.DEATH else 2
