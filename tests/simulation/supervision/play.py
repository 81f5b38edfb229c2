"""A seed of a supervised run, played to its end."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from asyncrl.control.api import operations as api
from asyncrl.control.record.history import read_history
from asyncrl.control.record.outcome import Outcome as RunOutcome
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.record.summary import NAMES, summarise
from asyncrl.control.roster import Roster
from asyncrl.control.rows.recorder import Recorder
from asyncrl.control.rows.row_files import iterate_rows
from asyncrl.control.supervisor import Supervisor
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import AsyncrlError
from asyncrl.core.rpc.message import Message
from asyncrl.core.status.statuses import Statuses
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.world import Process, World
from tests.simulation.outcome import Outcome
from tests.simulation.parts.stage import play_stage
from tests.simulation.parts.strikes import Strike
from tests.simulation.supervision.cluster import Curse, PlayedCluster, PlayedKernel, PlayedLauncher
from tests.simulation.supervision.judge import MAX_RESTARTS, SupervisionJudge
from tests.simulation.supervision.scenario import Scenario, draw_scenario
from tests.simulation.supervision.services import Learner

SETTLE_S, CURSED_S = 250.0, 1500.0
"""Virtual seconds after the last fault within which all is as it is wanted, or the run has ended."""
WORK_S, END_S = 100.0, 400.0
LOOK_S = 1.0
BACK_S = (0.3, 2.0)
"""After which a supervisor that died is started again."""
START_DEADLINE_S = 100.0
SUPERVISOR = "supervisor.0"
T = TypeVar("T")


def play(seed: int, faults: str = "general", keeps_lines: bool = False) -> Outcome:
    """Play a seed of a class of faults."""
    scenario = draw_scenario(seed, faults)
    world = World(f"supervision/{faults}/{seed}", scenario.preempts, keeps_lines)
    return play_stage(seed, faults, world, lambda world, _, folder: Stage(world, scenario, folder))


@contextmanager
def _own_limit() -> Iterator[None]:
    """Restore the limit of a file's size, which stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def make_config(scenario: Scenario) -> Config:
    """Return the configuration of a run."""
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "reward": {"fn": "gsm8k"},
            "rollout": {"replicas": scenario.replicas, "standby": scenario.standby, "cpus": 0},
            "learner": {"steps": scenario.steps, "cpus": 0},
            "launcher": {"start_deadline_s": START_DEADLINE_S, "max_restarts": MAX_RESTARTS},
        }
    )


def write_figures(run_dir: RunDir, config: Config, statuses: Statuses, outcome: RunOutcome) -> None:
    """Write the summary, and draw no curves."""
    history = read_history(iterate_rows(run_dir.metrics), NAMES)
    write_json(run_dir.summary, summarise(history, config, statuses) | {"state": outcome.state})


class Stage:
    """A world of a supervised run and its faults."""

    def __init__(self, world: World, scenario: Scenario, folder: Path) -> None:
        self.world, self.scenario, self._folder = world, scenario, folder
        (folder / "logs").mkdir()
        self.judge = SupervisionJudge(world, scenario, folder)
        self.cluster = PlayedCluster(world, scenario, self.judge)
        self._wires = Wires(world)
        self._dice = random.Random(f"stage/{scenario.faults}/{scenario.seed}")
        self._roster = Roster(make_config(scenario), folder, "abcd1234", folder, "", secret="secret")
        self._process: Process | None = None
        self._supervisor: Supervisor | None = None
        self._is_full = False
        world.on_kill.append(self._hear_end)

    # --- the supervisor ---------------------------------------------------------------------------

    def _start(self) -> None:
        self._process = self.world.process(SUPERVISOR)
        self.world.note(f"start {self._process}")
        runtime = SimRuntime(self._process, self._wires)
        self.world.spawn(self._process, "main", lambda: self._supervise(runtime))

    def _supervise(self, runtime: SimRuntime) -> None:
        launcher = PlayedLauncher(self.cluster, runtime)
        recorder = Recorder(RunDir(self._folder).metrics, runtime)
        kernel = PlayedKernel(self.cluster)
        supervisor = Supervisor(self._roster, launcher, recorder, runtime, kernel)
        supervisor.summarise = write_figures
        self._supervisor = supervisor
        supervisor.run(runtime.event())
        self.judge.has_ended, self.judge.ended_full = True, self._is_full

    def _hear_end(self, process: Process) -> None:
        if not self.judge.has_ended:
            self._supervisor = None
            self.judge.hear_blow(SUPERVISOR)
            self.world.after(self._dice.uniform(*BACK_S), self._start)

    def _operate(self, request: api.AnyRequest, hear: Callable[[Message], None]) -> None:
        """Have the supervisor carry out an operation."""
        supervisor, process = self._supervisor, self._process
        if supervisor is None or process is None or self.judge.has_ended:
            return

        def work() -> None:
            try:
                hear(supervisor.operations.perform(request))
            except AsyncrlError as error:
                self.world.note(f"refused {request}: {type(error).__name__}")
            except OSError:
                if not self.judge.was_full:
                    raise

        self.world.note(f"ask {request}")
        self.world.spawn(process, "api", work)

    # --- faults -----------------------------------------------------------------------------------

    @property
    def num_starts(self) -> int:
        """Services that were started."""
        return self.cluster.num_starts

    def play(self) -> None:
        """Let everything happen, then judge."""
        with _own_limit():
            self._play()

    def _play(self) -> None:
        world, scenario = self.world, self.scenario
        self._start()
        world.after(LOOK_S, self._look)
        for strike in scenario.strikes:
            world.after(strike.at, self._strike, strike)
        world.run(scenario.calm_at)
        self._calm()
        patience_s = CURSED_S if self.judge.cursed else SETTLE_S
        world.run(world.now + patience_s, self._is_settled)
        if not self._is_settled():
            self.judge.say(f"live: {self.judge.unsettled(self.cluster)}")
        elif not self.judge.has_ended:
            self._judge_work()
        self._stop()
        world.run(world.now + END_S, lambda: self.judge.has_ended)
        if not self.judge.has_ended:
            self.judge.say("end: the run does not end")
        else:
            self.judge.judge_end(self.cluster)
        for sentence in world.crashes:
            self.judge.say(f"bug: {sentence}")

    def _look(self) -> None:
        supervisor = self._supervisor
        self.judge.look(self.cluster, supervisor is not None)
        if supervisor is not None and supervisor.snapshot().state != supervisor.status().run:
            self.judge.say("bug: the page and the head are told of two states")  # they are asked at once
        self.world.after(LOOK_S, self._look)

    def _is_settled(self) -> bool:
        return self.judge.has_ended or not self.judge.unsettled(self.cluster)

    def _judge_work(self) -> None:
        """A run that is as it is wanted trains, and keeps its promises."""
        before = len(self.judge.steps), max(self.judge.steps, default=0)
        if self.judge.wanted == {0} or self.judge.was_zero:
            return

        def is_done() -> bool:
            has_trained = max(self.judge.steps, default=0) > before[1] or len(self.judge.steps) > before[0]
            return self.judge.has_ended or (has_trained and not self.judge.unkept(self.cluster))

        self.world.run(self.world.now + WORK_S, is_done)
        if not is_done():
            self.judge.say(self.judge.unkept(self.cluster) or "live: no step is trained")

    def _calm(self) -> None:
        self.world.note("calm")
        self.cluster.slow.clear()
        self.cluster.curses.clear()
        self._fill(False)
        self._pause(False)

    def _strike(self, strike: Strike) -> None:
        self.world.note(f"strike {strike}")
        kind, name, cluster = strike.kind, strike.target, self.cluster
        if kind in ("die", "pair"):
            for one in name.split("|"):
                self._kill(one)
        elif kind in ("error", "hang", "halt", "sulk"):
            self._ail(kind, name, strike.seconds)
        elif kind == "stuck":
            cluster.stuck_next.add(name)
            self._kill(name)
        elif kind == "curse":
            self.judge.cursed.add(name.replace("receiver", "rollout"))
            cluster.curses[name] = Curse(int(strike.amount), strike.seconds, self._dice.random() < 0.5)
            self._kill(name)
        elif kind == "slow":
            cluster.slow[name] = strike.seconds
        elif kind == "supervisor" and self._process is not None:
            self._process.fuse = int(strike.amount)
        elif kind == "full":
            self._fill(True)
            self.world.after(strike.seconds, self._fill, False)
        else:
            self._ask(strike)

    def _kill(self, name: str) -> None:
        life = self.cluster.lives.get(name)
        if name == SUPERVISOR and self._process is not None and not self.judge.has_ended:
            self._process.kill()
        elif life is not None:
            self.cluster.die(life)

    def _ail(self, kind: str, name: str, seconds: float) -> None:
        life = self.cluster.lives.get(name)
        if life is None or life.is_over or life.is_silent:
            return
        if kind == "error":
            self.cluster.fail(life)
            return
        life.is_silent, life.is_halted = True, kind == "halt"
        self.judge.hear_blow(name, seconds if kind == "sulk" else 100.0)
        if kind == "sulk":
            self.world.after(seconds, lambda: setattr(life, "is_silent", False))

    def _fill(self, is_full: bool) -> None:
        """Have files grow no more, or grow again."""
        self._is_full = is_full
        self.judge.was_full |= is_full
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))

    # --- the operator -----------------------------------------------------------------------------

    def _ask(self, strike: Strike) -> None:
        if strike.kind == "scale":
            self._scale(int(strike.amount))
        elif strike.kind == "drain":
            self._operate(api.DrainReplica(int(strike.target.partition(".")[2])), lambda answer: None)
        elif strike.kind == "pause":
            self._pause(True)
            self.world.after(strike.seconds, self._pause, False)
        elif strike.kind == "stop":
            self._stop()
        elif strike.kind == "checkpoint":
            self._operate(api.WriteCheckpoint(), self._hear_promise)
        if strike.kind in ("stop", "checkpoint") and strike.target:
            self.world.after(strike.seconds, self._kill, strike.target)

    def _scale(self, replicas: int) -> None:
        before = set(self.judge.wanted)

        def hear(answer: Message) -> None:
            self.judge.wanted = {replicas}
            self.judge.was_zero |= replicas == 0

        if self._supervisor is not None:
            self.judge.wanted = before | {replicas}
            self._operate(api.Scale(replicas), hear)

    def _hear_promise(self, answer: Message) -> None:
        assert isinstance(answer, api.CheckpointAsked)
        self.judge.promised.append(answer.step)

    def _pause(self, is_paused: bool) -> None:
        def hear(answer: Message) -> None:
            self.judge.paused_at = self.world.now if is_paused else None

        if not is_paused:
            self.judge.paused_at = None
        self._operate(api.Pause() if is_paused else api.Unpause(), hear)

    def _stop(self) -> None:
        def hear(answer: Message) -> None:
            self.judge.was_stopped = True

        learner = self.cluster.lives.get("learner.0")
        if isinstance(learner, Learner):
            self.judge.done_at_stop.setdefault(learner.number, learner.step)
        self._operate(api.Stop(), hear)
