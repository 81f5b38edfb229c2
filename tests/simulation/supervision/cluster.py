"""A played cluster: a launcher over scripted services, and what befalls them.

Owns the lives of all services, the checkpoints on the disk, and the leases. The supervisor sees it through
`Launcher` and `Kernel` only.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from asyncrl.control.roster import ServiceSpec
from asyncrl.core.errors import DeadlineExceeded, ServiceFailed
from asyncrl.core.service_command import A, Command
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ServiceStatus
from asyncrl.core.status.statuses import Statuses
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.world import World
from tests.simulation.supervision.judge import SupervisionJudge
from tests.simulation.supervision.scenario import Scenario
from tests.simulation.supervision.services import Learner, Life, Rollout, make_life

LATENCY_S = (0.001, 0.03)
STOP_LOOK_S = 0.1
LEASE_S = 60.0


@dataclass
class Curse:
    """The next `num_left` lives of a service end so soon after their beginning, by an error or a death."""

    num_left: int
    after_s: float
    has_error: bool


class PlayedCluster:
    """See the module.

    Attributes:
        lives: The newest life of each name, until it is killed by the supervisor.
        checkpoints: Steps, oldest first. leases: By replica, the number of the life that holds them.
        slow: Names whose services take so many seconds more to leave.
    """

    def __init__(self, world: World, scenario: Scenario, judge: SupervisionJudge) -> None:
        self.world, self.judge, self.seed = world, judge, scenario.seed
        self.step_s, self.save_s = scenario.step_s, scenario.save_s
        self.checkpoint_every = scenario.checkpoint_every
        self.lives: dict[str, Life] = {}
        self.checkpoints: list[int] = []
        self.leases: dict[str, int] = {}
        self.slow: dict[str, float] = {}
        self.curses: dict[str, Curse] = {}
        self.stuck_next: set[str] = set()
        self.num_starts = 0
        self.dice = random.Random(f"cluster/{scenario.faults}/{scenario.seed}")

    def works(self, name: str) -> bool:
        """Tell whether a service works."""
        return name in self.lives and self.lives[name].is_working

    def has_groups(self) -> bool:
        """Tell whether the learner finds anything to train on."""
        replicas = (life for life in self.lives.values() if isinstance(life, Rollout))
        return self.works("buffer.0") and any(life.is_working and not life.is_standby for life in replicas)

    def leave_s(self, name: str, dice: random.Random) -> float:
        """Draw how long a service takes to leave."""
        return dice.uniform(0.05, 1.0) + self.slow.get(name, 0.0)

    # --- lives ------------------------------------------------------------------------------------

    def begin(self, spec: ServiceSpec) -> None:
        """Begin a life."""
        name, before = spec.name, self.lives.get(spec.name)
        self.judge.hear_start(name, before, self)
        if before is not None and before.is_alive:
            raise ServiceFailed(f"{name} could not be started: the name is taken")
        self.num_starts += 1
        life = self.lives[name] = make_life(self, spec, self.num_starts)
        self.world.note(f"start {life}")
        if name in self.stuck_next:
            self.stuck_next.discard(name)
            life.is_stuck = True
            self.judge.hear_blow(name)
        curse = self.curses.get(name)
        if curse is not None and curse.num_left:
            curse.num_left -= 1
            self.world.after(curse.after_s, self.fail if curse.has_error else self.die, life)

    def die(self, life: Life) -> None:
        """End a life's process."""
        if life.is_alive:
            self.world.note(f"die {life}")
            self.judge.hear_death(life)
            life.is_alive = False

    def fail(self, life: Life) -> None:
        """Have a life end by an error."""
        if not life.is_over:
            self.world.note(f"fail {life}")
            self.judge.hear_death(life)
            life.state, life.error = ServiceState.FAILED, "OSError: no such device"

    def remove(self, name: str) -> None:
        """End a life's process for good, by order of the supervisor."""
        life = self.lives.pop(name, None)
        if life is not None:
            self.world.note(f"kill {life}")
            if isinstance(life, Learner):
                self.judge.hear_removal(life, life.step, life.saved)
            if isinstance(life, Rollout):
                self.judge.hear_replica_removal(life)
            life.is_alive = False
            if self.leases.get(name) == life.number:
                self.world.after(LEASE_S, self._run_out, name, life.number)

    def _run_out(self, name: str, number: int) -> None:
        if self.leases.get(name) == number:
            del self.leases[name]


class PlayedLauncher:
    """Implements `Launcher`, for one life of a supervisor."""

    def __init__(self, cluster: PlayedCluster, runtime: SimRuntime) -> None:
        self._cluster, self._runtime = cluster, runtime

    def _pass(self) -> None:
        self._runtime.sleep(self._cluster.dice.uniform(*LATENCY_S))

    def start(self, spec: ServiceSpec) -> None:
        self._pass()
        self._cluster.begin(spec)
        self._pass()

    def statuses(self, names: Iterable[str], deadline_s: float) -> Statuses:
        names = list(names)
        self._pass()
        lives = self._cluster.lives
        if any(name in lives and lives[name].is_alive and lives[name].is_silent for name in names):
            self._runtime.sleep(deadline_s)
        gone = ServiceStatus(state=ServiceState.DEAD, error="it has no process")
        return Statuses({name: lives[name].status() if name in lives else gone for name in names})

    def command(self, name: str, command: Command[A], deadline_s: float) -> A:
        self._pass()
        life = self._cluster.lives.get(name)
        if life is None or not life.is_alive or life.state == ServiceState.FAILED:
            raise ServiceFailed(f"{name} failed '{command.word}': it has no process")
        if life.is_silent:
            self._runtime.sleep(deadline_s)
            raise DeadlineExceeded(f"{name} did not answer '{command.word}'")
        if life.state == ServiceState.STARTING:
            raise ServiceFailed(f"{name} failed '{command.word}': it is starting")
        answer: Any = life.command(command)  # type: ignore[arg-type]
        self._pass()
        return answer  # type: ignore[no-any-return]

    def stop(self, names: Iterable[str], deadline_s: float) -> set[str]:
        self._pass()
        left = {name for name in names if name in self._cluster.lives}
        told = {name: self._cluster.lives[name] for name in left}
        for life in told.values():
            life.ask_to_end()
        end = self._runtime.now() + deadline_s
        while self._runtime.now() < end and not all(life.is_over for life in told.values()):
            self._runtime.sleep(STOP_LOOK_S)
        return {name for name in names if name not in told or told[name].is_over}

    def kill(self, name: str) -> None:
        self._pass()
        self._cluster.remove(name)
        self._pass()

    def adopt(self) -> set[str]:
        self._pass()
        return {name for name, life in self._cluster.lives.items() if life.is_alive}


class PlayedKernel:
    """Implements `Kernel`: of processes it knows only which are stopped."""

    def __init__(self, cluster: PlayedCluster) -> None:
        self._cluster = cluster

    def look(self, now: float) -> None:
        """Nothing is ever killed for want of memory."""

    def recent(self, now: float) -> str:
        return ""

    def stopped_services(self, run_id: str) -> set[str]:
        lives = self._cluster.lives.items()
        return {name for name, life in lives if life.is_alive and life.is_halted}

    def end_service(self, run_id: str, name: str, others: Collection[int]) -> list[int]:
        return []

    def remove_segments(self, run_id: str, name: str) -> None:
        """A played service has none."""
