"""A seed of weight sync, played from its first process to the end of its last fault and beyond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.world import World
from tests.simulation.outcome import Outcome
from tests.simulation.parts.stage import play_stage
from tests.simulation.parts.strikes import Strike
from tests.simulation.sync.cluster import SyncCluster
from tests.simulation.sync.content import Truth
from tests.simulation.sync.judge import Judge
from tests.simulation.sync.scenario import Scenario, draw_scenario

PATIENCE_S = 90.0
"""Virtual seconds after the last fault within which all must have come to the last version."""
MAX_SEGMENTS = {"publisher": 10, "receiver": 3}
"""Of a name's processes at rest. A receiver's: two free ones, and one that is the base of differences. A
segment that is shared has a second name."""


def play(seed: int, faults: str = "general", keeps_lines: bool = False) -> Outcome:
    """Play a seed of a class of faults."""
    scenario = draw_scenario(seed, faults)
    world = World(f"sync/{faults}/{seed}", scenario.preempts, keeps_lines)
    return play_stage(seed, faults, world, lambda *where: Stage(scenario, *where))


class Stage:
    """A world of weight sync and its faults."""

    def __init__(self, scenario: Scenario, world: World, prefix: str, folder: Path) -> None:
        self.world, self.scenario = world, scenario
        self._folder = folder.parent
        wires = Wires(world, prefix.encode())
        truth = Truth(f"{scenario.seed}", is_sparse=scenario.uses_delta)
        self.judge = Judge(world, wires, truth)
        self.cluster = SyncCluster(world, wires, scenario, truth, self.judge, prefix, folder)

    @property
    def num_starts(self) -> int:
        """Processes that were started."""
        return self.cluster.crew.num_starts

    def play(self) -> None:
        """Let everything happen, then judge."""
        world, cluster = self.world, self.cluster
        cluster.begin()
        for strike in self.scenario.strikes:
            world.after(strike.at, self._strike, strike)
        calm_at = max(self.scenario.calm_at, self.scenario.every_s * self.scenario.versions)
        world.run(calm_at)
        cluster.crew.calm()
        world.run(calm_at + PATIENCE_S, self._is_settled)
        self._judge_end()

    def _strike(self, strike: Strike) -> None:
        if not strike_weights(self.cluster, strike):
            self.cluster.crew.strike(strike)

    def _behind(self) -> list[str]:
        """Return which replicas do not serve the newest version."""
        judge, crew = self.judge, self.cluster.crew
        newest, behind = judge.truth.published, []
        for name in self.cluster.staying:
            process, engine = crew.processes[name], self.cluster.engines.get(name)
            number = engine.number if process.is_alive and engine is not None else 0
            if number != newest or judge.served_by(process) != newest:
                behind.append(f"{name} serves {number} of {newest}")
        return behind

    def _is_settled(self) -> bool:
        return self.judge.num_published >= self.scenario.versions and not self._behind()

    def _judge_end(self) -> None:
        judge, cluster = self.judge, self.cluster
        if judge.num_published < self.scenario.versions:
            judge.say(f"live: {judge.num_published} of {self.scenario.versions} versions were published")
        for sentence in self._behind():
            judge.say(f"live: {sentence}")
        for sentence in self.world.crashes:
            judge.say(f"bug: {sentence}")
        for sentence in cluster.carriage.faults:
            judge.say(f"S5: {sentence}")
        for name, num in Counter(path.name.partition("-")[0] for path in self._segments()).items():
            most = MAX_SEGMENTS[name.partition(".")[0]]
            if num > most:
                judge.say(f"leak: {num} segments of {name} are left, at most {most} are in use")

    def _segments(self) -> Iterator[Path]:
        """Yield the segments that are left, and say of names that are left without them."""
        paths = {path for path in self._folder.iterdir() if path.is_file()}
        for path in paths:
            is_shared = path.suffix[1:].isdigit() and path.with_suffix("") in paths
            if not is_shared:
                yield path


def strike_weights(cluster: SyncCluster, strike: Strike) -> bool:
    """Let a fault of weight sync befall a cluster; False if it is none."""
    match strike.kind:
        case "garble":
            cluster.carriage.garbled[strike.target] = strike.amount
            cluster.world.after(strike.seconds, cluster.carriage.garbled.pop, strike.target, None)
        case "refuse":
            cluster.refusals[strike.target] += 1
        case "pin":
            cluster.pins[strike.target] = strike.seconds
        case "join":
            cluster.join()
        case "leave":
            cluster.leave(strike.target)
        case _:
            return False
    return True
