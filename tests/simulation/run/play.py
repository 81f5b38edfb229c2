"""A seed of a whole run, played to its end."""

from __future__ import annotations

import contextlib
from pathlib import Path

from asyncrl.buffer.ledger.state import LedgerState
from learner.checkpoint.store import MANIFEST
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.world import World
from tests.simulation.outcome import Outcome
from tests.simulation.parts.journal import Disk
from tests.simulation.parts.stage import play_stage
from tests.simulation.parts.strikes import Strike
from tests.simulation.run.cluster import RunCluster
from tests.simulation.run.data import read_data
from tests.simulation.run.judge import RunJudge
from tests.simulation.run.rank import STATE_FILE
from tests.simulation.run.scenario import Scenario, draw_scenario
from tests.simulation.sync.content import Truth
from tests.simulation.sync.play import strike_weights
from weight_sync.memory.pool import MAX_TAKEN

PATIENCE_S = 150.0
"""Virtual seconds after the last fault within which a run must have ended."""
RECOUNT_S, RESTART_S = 2.0, 1.0


def play(seed: int, faults: str = "general", keeps_lines: bool = False) -> Outcome:
    """Play a seed of a class of faults."""
    read_data()
    scenario = draw_scenario(seed, faults)
    world = World(f"run/{faults}/{seed}", scenario.preempts, keeps_lines)
    return play_stage(seed, faults, world, lambda *where: Stage(scenario, *where))


class Stage:
    """A world of a run and its faults."""

    def __init__(self, scenario: Scenario, world: World, prefix: str, folder: Path) -> None:
        self.world, self.scenario = world, scenario
        self._segments = folder.parent
        self._asked_at, self._has_rotted = 0.0, False
        wires, disk = Wires(world, prefix.encode()), Disk()
        truth = Truth(f"{scenario.seed}", is_sparse=scenario.uses_delta)
        self.judge = RunJudge(world, wires, truth, scenario, disk)
        self.cluster = RunCluster(world, wires, scenario, truth, self.judge, prefix, folder, disk)

    @property
    def num_starts(self) -> int:
        """Processes that were started."""
        return self.cluster.crew.num_starts

    def play(self) -> None:
        """Let everything happen, then judge."""
        world, cluster = self.world, self.cluster
        cluster.begin()
        world.after(RECOUNT_S, self._recount)
        for strike in self.scenario.strikes:
            world.after(strike.at, self._strike, strike)
        world.run(self.scenario.calm_at)
        cluster.crew.calm()
        world.run(self.scenario.calm_at + PATIENCE_S, self._is_settled)
        self._judge_end()

    def _recount(self) -> None:
        self.judge.recount(self._ledger_at_rest())
        self.world.after(RECOUNT_S, self._recount)

    def _ledger_at_rest(self) -> LedgerState | None:
        """Return the buffer's ledger if its process lives and has nothing that is not journalled."""
        store, process = self.cluster.store, self.cluster.crew.processes["buffer.0"]
        if (
            store is None
            or not process.is_alive
            or not store.is_committed
            or self.cluster.buffer_of is not process
        ):
            return None
        return store.ledger.state

    def _strike(self, strike: Strike) -> None:
        cluster, world = self.cluster, self.world
        if strike_weights(cluster, strike):
            return
        world.note(f"strike {strike}")
        if strike.kind == "away":
            cluster.disk.is_away = True
            world.after(strike.seconds, self._bring_back)
        elif strike.kind == "damage":
            cluster.disk.damage(world.dice)
        elif strike.kind == "pause":
            cluster.pause(True)
            world.after(strike.seconds, cluster.pause, False)
        elif strike.kind == "rot":
            self._rot()
        elif strike.kind == "power":
            self._cut_power()
        else:
            cluster.crew.strike(strike)

    def _rot(self) -> None:
        """Damage the newest checkpoint, once, and only where there is an older one."""
        steps = sorted((self._segments / "run" / "checkpoints").glob("step-*"))
        if len(steps) > 1 and not self._has_rotted:
            self._has_rotted = True
            self.world.note(f"rot {steps[-1].name}")
            if self.scenario.seed % 5 == 1:
                (steps[-1] / MANIFEST).unlink()
            elif self.scenario.seed % 5 == 2:
                (steps[-1] / MANIFEST).write_text("{}")
            else:
                (steps[-1] / STATE_FILE).write_text('{"node": 1}')

    def _bring_back(self) -> None:
        self.cluster.disk.is_away = False

    def _cut_power(self) -> None:
        """Every process dies, memory is lost, and of the disk what was not synced."""
        crew, world = self.cluster.crew, self.world
        for process in (*crew.twins, *crew.processes.values()):
            process.kill()
        for path in self._segments.iterdir():
            if path.is_file():
                path.unlink()
        with contextlib.suppress(FileNotFoundError):
            (self._segments / "run" / "weight_sync.jsonl").unlink()
        if "learner.0" in crew.gone:  # the run had ended, and is started again
            crew.gone.remove("learner.0")
            world.after(RESTART_S, crew.start, "learner.0")
        world.note(f"power cut: {self.cluster.disk.cut_power(world.dice)} turns are lost")
        self.judge.cut_power()

    def _is_settled(self) -> bool:
        return not self._unsettled()

    def _unsettled(self) -> str:
        """Return what keeps the run from being over, "" if nothing does."""
        judge, cluster = self.judge, self.cluster
        if not judge.last_node:
            return f"the learner has not ended, {judge.num_steps} steps were trained"
        if self.world.now - self._asked_at >= 0.5:
            self._asked_at = self.world.now
            judge.recount(self._ledger_at_rest())
        if judge.open_evaluations:
            return f"evaluations {judge.open_evaluations} have not ended"
        newest = judge.truth.published
        for name in cluster.staying if not self._is_left_out() else ():
            process, engine = cluster.crew.processes[name], cluster.engines.get(name)
            number = engine.number if process.is_alive and engine is not None else 0
            if number != newest or judge.served_by(process) != newest:
                return f"{name} serves {number} of {newest}"
        return ""

    def _is_left_out(self) -> bool:
        """Tell whether the last version is with no publisher any more, for it was killed twice with it.

        The learner has ended: nobody makes another one, and a replica that began since serves none.
        """
        service = self.cluster.living("publisher.0")
        if service is None or service._pool.current is not None:
            return False
        left = service._pool._state_file.read()
        return left is not None and left.manifest is not None and left.num_taken >= MAX_TAKEN

    def _judge_end(self) -> None:
        judge = self.judge
        if unsettled := self._unsettled():
            judge.say(f"live: {unsettled}")
        else:
            judge.judge_end(self._ledger_at_rest())
        for sentence in self.world.crashes:
            judge.say(f"bug: {sentence}")
        for sentence in self.cluster.carriage.faults:
            judge.say(f"S5: {sentence}")
