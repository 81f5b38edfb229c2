"""A played supervisor: starts processes by their names, and again when they die; strikes them.

Owns which process has which name, and the plans to kill one at a fault point. It decides nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.core.errors import AsyncrlError
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.world import Process, World
from tests.simulation.parts.intruder import intrude
from tests.simulation.parts.strikes import Strike

Main = Callable[[SimRuntime], None]
RESTART_S = (0.2, 1.5)
SWOLLEN_BYTES = 1 << 40
ANSWERED, ANSWER_KILL_S = "rollout.evaluated", 3.0
"""A point between an answer and its report; who would stand still there for less is killed."""
TRAP_S = 6.0
"""Duration of a plan to strike at a fault point."""


@dataclass
class _Trap:
    name: str
    until: float
    num_left: int
    strike: Strike


class Crew:
    """See the module.

    Args:
        mains: By kind of service, returns what a process of that name does.
        hosts: By kind of service, the host; `*` stands for the number.
        address_of: Returns where a service of a name listens.

    Attributes:
        processes: The newest one of each name.
        twins: Processes that were thought dead and live.
        gone: Names that are not started again.
        on_loss: Called with the name of a process that died, or is thought dead.
        is_calm: No fault befalls anybody any more.
    """

    def __init__(
        self,
        world: World,
        wires: Wires,
        mains: dict[str, Callable[[str], Main]],
        hosts: dict[str, str],
        address_of: Callable[[str], str],
    ) -> None:
        self.world, self.wires, self._mains, self._hosts = world, wires, mains, hosts
        self.address_of = address_of
        self.processes: dict[str, Process] = {}
        self.twins: list[Process] = []
        self.gone: set[str] = set()
        self.on_loss: list[Callable[[str], None]] = []
        self.is_calm = False
        self.num_starts = 0
        self.failures: list[str] = []
        self._dice = random.Random(world.dice.random())
        self._traps: list[_Trap] = []
        world.on_point.append(self._pass_point)
        world.on_kill.append(self._hear_end)

    def start(self, name: str) -> Process:
        """Start a process under a name."""
        kind, _, index = name.partition(".")
        process = self.world.process(name, self._hosts[kind].replace("*", index))
        self.processes[name] = process
        self.num_starts += 1
        self.world.note(f"start {process}")
        main, runtime = self._mains[kind](name), SimRuntime(process, self.wires)

        def work() -> None:
            try:
                main(runtime)
            except AsyncrlError as error:  # a service may fail: it is started again
                self.failures.append(f"{process}: {type(error).__name__}: {error}")
                self.world.note(f"failed {process} {type(error).__name__}: {error}")
            self.world.after(0.0, process.kill)

        self.world.spawn(process, "main", work)
        return process

    def _hear_end(self, process: Process) -> None:
        if self.processes.get(process.name) is process and process.name not in self.gone:
            self.world.after(self._dice.uniform(*RESTART_S), self._restart, process)
            self._tell_loss(process.name)

    def _tell_loss(self, name: str) -> None:
        for hear in self.on_loss:
            hear(name)

    def _restart(self, process: Process) -> None:
        if self.processes.get(process.name) is process and process.name not in self.gone:
            self.start(process.name)

    def retire(self, name: str) -> None:
        """Start nothing under this name any more."""
        self.gone.add(name)

    # --- strikes ----------------------------------------------------------------------------------

    def strike(self, strike: Strike) -> None:
        """Let a fault befall a process, a connection or the network."""
        world, name = self.world, strike.target
        world.note(f"strike {strike}")
        process = self.processes.get(name)
        if strike.kind == "kill" and process is not None:
            process.fuse = int(strike.amount)
        elif strike.kind in ("ambush", "snare", "answering"):
            self._traps.append(_Trap(name, world.now + TRAP_S, int(strike.amount), strike))
        elif strike.kind == "stop" and process is not None:
            process.freeze()
            world.after(strike.seconds, process.thaw)
        elif strike.kind == "twin" and process is not None:
            self._forsake(process, strike.seconds, strike.amount)
        elif strike.kind == "lost" and process is not None:
            self._lose(process, strike.seconds)
        elif strike.kind == "part":
            one, _, other = name.partition("|")
            self.wires.part(one, other, strike.seconds)
        elif strike.kind == "cut":
            self.wires.cut(name, strike.amount)
        elif strike.kind == "intrude":
            intrude(world.process("intruder"), self.wires, self.address_of(name))
        elif strike.kind == "swell" and process is not None:
            process.memory_bytes += SWOLLEN_BYTES
        elif strike.kind == "slow":
            self.wires.delay_share, self.wires.delay_s = 0.3, strike.amount
            world.after(strike.seconds, self._end_slowness)

    def _end_slowness(self) -> None:
        self.wires.delay_share = self.wires.delay_s = 0.0

    def _forsake(self, process: Process, seconds: float, pause_s: float) -> None:
        """Think it dead: it stands still, is replaced, goes on beside its successor, and dies at last."""
        if not process.is_alive:
            return
        process.freeze()
        self.twins.append(process)
        self._tell_loss(process.name)
        pause_s = min(seconds, pause_s)
        self.world.after(pause_s * self._dice.uniform(0.3, 1.0), self._restart, process)
        self.world.after(pause_s, process.thaw)
        self.world.after(seconds, process.kill)

    def _lose(self, process: Process, pause_s: float) -> None:
        """Stop it for good: its connections stay up, and nobody answers."""
        process.freeze()
        self._tell_loss(process.name)
        self.world.after(pause_s, self._restart, process)

    def _pass_point(self, process: Process, name: str, place: tuple[int | None, ...]) -> None:
        for trap in list(self._traps):
            if self.world.now >= trap.until:
                self._traps.remove(trap)
            elif trap.name == process.name and (trap.strike.kind != "answering" or name == ANSWERED):
                trap.num_left -= 1
                if trap.num_left < 0:
                    self._traps.remove(trap)
                    self.world.note(f"{trap.strike.kind} at {name} {place}")
                    self._spring(trap.strike, process)
                    return

    def _spring(self, strike: Strike, process: Process) -> None:
        if strike.kind == "ambush" or (strike.kind == "answering" and strike.seconds < ANSWER_KILL_S):
            process.kill()
        else:
            self._forsake(process, strike.seconds, self._dice.uniform(0.3, strike.seconds))
            self.world.block(0.0)  # it stands still here

    def calm(self) -> None:
        """End what still goes on of faults: what stands still goes on, twins die."""
        self.is_calm = True
        self._traps.clear()
        for process in (*self.twins, *list(self.processes.values())):
            process.fuse = None
            process.thaw()
        for twin in self.twins:
            if self.processes.get(twin.name) is not twin:
                twin.kill()
