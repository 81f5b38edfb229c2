"""The runtime of one simulated process (`asyncrl.core.runtime.interface`): what production code is handed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.core.runtime.interface import Event, Lock, Network, Queue, Task
from tests.simulation.kernel.loop import SimLoop
from tests.simulation.kernel.network import SimNetwork, Wires
from tests.simulation.kernel.primitives import SimEvent, SimLock, SimQueue, SimTask
from tests.simulation.kernel.world import Process

T = TypeVar("T")
EPOCH_S = 1_700_000_000.0


class SimRuntime:
    """See the module. Its clock is that of its host, which is ahead of the others'."""

    def __init__(self, process: Process, wires: Wires) -> None:
        self.process, self.world = process, process.world
        self._network = SimNetwork(wires, process)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def network(self) -> Network:
        return self._network

    def now(self) -> float:
        return self.world.now + self.process.clock_ahead_s

    def sleep(self, seconds: float) -> None:
        self.world.touch()
        self.world.block(max(0.0, seconds))

    def wall_ns(self) -> int:
        return int((EPOCH_S + self.world.now) * 1e9)

    def new_id(self) -> str:
        return self.world.new_id()

    def resident_bytes(self) -> int:
        return self.process.memory_bytes

    def event(self) -> Event:
        return SimEvent(self.world)

    def lock(self) -> Lock:
        return SimLock(self.world)

    def queue(self) -> Queue[Any]:
        return SimQueue(self.world)

    def spawn(self, name: str, run: Callable[[], object]) -> Task:
        self.world.touch()
        return SimTask(self.world, self.world.spawn(self.process, name, run))

    def run_async(self, main: Coroutine[Any, Any, T]) -> T:
        return SimLoop(self.process).run(main)  # type: ignore[no-any-return]
