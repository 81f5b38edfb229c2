"""Scripted services of a played cluster: state machines on the timers of the world, without processes.

Owns what a life of a service does and says. Invariant: a life that is over changes nothing any more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.control.roster import ServiceSpec
from asyncrl.core.metrics.row_log import RowLog
from asyncrl.core.rpc.message import Done, Message
from asyncrl.core.service_command import (
    AnyCommand,
    DeregisterReplica,
    Drain,
    HandOverRows,
    Pause,
    PauseState,
    Promote,
    Rows,
    Standing,
    StepsDone,
    Unpause,
    WriteCheckpoint,
)
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ServiceStatus, kind_of
from tests.statuses import status_of

if TYPE_CHECKING:
    from tests.simulation.supervision.cluster import PlayedCluster

LOOK_S = 0.2
DRAWN = {"rollout": (0.5, 6.0), "learner": (0.3, 4.0), "buffer": (0.1, 1.0)}
"""Seconds that a start takes, by kind."""
OTHERS = (0.1, 1.5)
VALUES: Mapping[str, Mapping[str, Any]] = {
    "buffer": {"issued": 0},
    "learner": {"step": 0},
    "rollout": {"version": 1, "trajectories": 0, "tokens": 0},
    "receiver": {"version": 1},
    "publisher": {"address": "p"},
    "weight_sync": {"address": "w"},
}
TEMPLATES = {kind: status_of(f"{kind}.0", values) for kind, values in VALUES.items()}


class Life:
    """One life of a service; a receiver, a publisher and a coordinator need no more than this.

    Attributes:
        is_alive: It has a process.
        is_silent, is_halted: The process does not answer; somebody has stopped it.
        is_stuck: It starts, and is never done with it.
    """

    def __init__(self, cluster: PlayedCluster, spec: ServiceSpec, number: int) -> None:
        self.cluster, self.spec, self.name, self.number = cluster, spec, spec.name, number
        self.world = cluster.world
        self.dice = random.Random(f"{cluster.seed}/{spec.name}/{number}")
        self.state = ServiceState.STARTING
        self.error = ""
        self.is_alive, self.is_silent, self.is_halted, self.is_stuck = True, False, False, False
        self.began_at = self.world.now
        low, high = DRAWN.get(kind_of(self.name), OTHERS)
        self.after(self.dice.uniform(low, high), self.come_up)

    def __repr__(self) -> str:
        return f"{self.name}#{self.number}"

    @property
    def is_working(self) -> bool:
        """Whether it does what it is for."""
        return self.is_alive and not self.is_silent and self.state == ServiceState.READY

    @property
    def has_come_up(self) -> bool:
        return self.state not in (ServiceState.STARTING, ServiceState.SYNCING)

    @property
    def is_over(self) -> bool:
        return not self.is_alive or self.state in (ServiceState.ENDED, ServiceState.FAILED)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have a call made unless this life is over by then; one that stands still makes it later."""

        def happen() -> None:
            if self.is_over:
                return
            if self.is_silent or (self.is_stuck and self.state == ServiceState.STARTING):
                self.after(LOOK_S, call)
            else:
                call()

        self.world.after(seconds, happen)

    def come_up(self) -> None:
        self.state = ServiceState.READY

    def status(self) -> ServiceStatus:
        """Return what it says."""
        if not self.is_alive:
            return ServiceStatus(state=ServiceState.DEAD, error="it was killed")
        if self.is_silent:
            return ServiceStatus(state=ServiceState.SILENT)
        if self.state in (ServiceState.STARTING, ServiceState.FAILED):
            return ServiceStatus(state=self.state, error=self.error)
        return msgspec.structs.replace(TEMPLATES[kind_of(self.name)], state=self.state, **self.values())

    def values(self) -> dict[str, Any]:
        """Return the fields of its status."""
        return {}

    def command(self, command: AnyCommand) -> Message:
        """Take a command."""
        return Done()

    def ask_to_end(self) -> None:
        """Take the request to stop."""
        self.after(self.cluster.leave_s(self.name, self.dice), self.end)

    def end(self) -> None:
        self.state = ServiceState.ENDED


class Buffer(Life):
    """Keeps who leases what, in its journal: the cluster's `leases`."""

    def __init__(self, cluster: PlayedCluster, spec: ServiceSpec, number: int) -> None:
        super().__init__(cluster, spec, number)
        self.paused = spec.context.is_paused

    def values(self) -> dict[str, Any]:
        leases = dict.fromkeys(self.cluster.leases, 2)
        known = tuple(self.cluster.checkpoints[-3:])
        return {"paused": self.paused, "leases": leases, "checkpoints": known}

    def command(self, command: AnyCommand) -> Message:
        if isinstance(command, DeregisterReplica):
            self.cluster.leases.pop(command.replica, None)
        if isinstance(command, Pause | Unpause):
            self.paused = isinstance(command, Pause)
            return PauseState(self.paused)
        return Done()


class Rollout(Life):
    """Leases from the buffer while it works."""

    def __init__(self, cluster: PlayedCluster, spec: ServiceSpec, number: int) -> None:
        super().__init__(cluster, spec, number)
        self.is_standby, self.num_answers, self.ready_at = spec.context.is_standby, 0, math.inf

    def come_up(self) -> None:
        self.state = ServiceState.SYNCING
        self._sync()

    def _sync(self) -> None:
        receiver = self.name.replace("rollout", "receiver")
        sources = ("learner.0", "publisher.0", "weight_sync.0", receiver)
        if self.state != ServiceState.SYNCING:
            return
        if not all(self.cluster.works(name) for name in sources):
            self.after(LOOK_S, self._sync)
            return
        self.state, self.ready_at = ServiceState.READY, self.world.now
        self._work()

    def _work(self) -> None:
        if self.state != ServiceState.READY:
            return
        if not self.is_standby and self.cluster.works("buffer.0"):
            self.cluster.leases[self.name] = self.number
            self.num_answers += 1
        self.after(0.5, self._work)

    def values(self) -> dict[str, Any]:
        engine = msgspec.structs.replace(
            TEMPLATES["rollout"].engine,  # type: ignore[attr-defined]
            trajectories=self.num_answers,
        )
        return {"standby": self.is_standby, "engine": engine}

    def command(self, command: AnyCommand) -> Message:
        if isinstance(command, Promote):
            self.is_standby = False
        if isinstance(command, Drain):
            self.state = ServiceState.DRAINING
            self.after(self.cluster.leave_s(self.name, self.dice), self.end)
            return Standing(self.state)
        return Done()

    def end(self) -> None:
        super().end()
        self.cluster.leases.pop(self.name, None)


class Learner(Life):
    """Takes steps while there is anything to train on, and writes checkpoints."""

    def __init__(self, cluster: PlayedCluster, spec: ServiceSpec, number: int) -> None:
        super().__init__(cluster, spec, number)
        self.paused = spec.context.is_paused
        self.step = self.resumed = self.saved = 0
        self.is_asked = self.is_ending = False
        self._log = RowLog(spec.context.run_dir)

    @property
    def steps(self) -> int:
        return self.spec.context.config.learner.steps

    def come_up(self) -> None:
        if not self.cluster.works("buffer.0"):
            self.after(LOOK_S, self.come_up)
            return
        self.step = self.resumed = self.saved = max(self.cluster.checkpoints, default=0)
        self.state = ServiceState.READY
        self._turn()

    def _turn(self) -> None:
        is_last = self.is_ending or self.step >= self.steps
        if is_last:
            self.state = ServiceState.FINISHING
        if (is_last and self.step > self.saved) or self.is_asked:
            self.after(self.cluster.save_s, self._save)
        elif is_last:
            self.end()
        elif not self.paused and self.cluster.has_groups():
            self.after(self.cluster.step_s, self._train)
        else:
            self.after(LOOK_S, self._turn)

    def _train(self) -> None:
        self.step += 1
        self.cluster.judge.hear_step(self, self.step)
        row = {"training/global_step": self.step, "time": round(self.world.now, 3), "timing_s/step": 1.0}
        self._log.add({**row, "timing_s/step": self.cluster.step_s + self.world.now / 1e6})
        if self.step % self.cluster.checkpoint_every == 0:
            self.is_asked = True
        self._turn()

    def _save(self) -> None:
        if not self.cluster.works("buffer.0"):
            self.after(LOOK_S, self._save)
            return
        self.saved, self.is_asked = self.step, False
        if self.step not in self.cluster.checkpoints:
            self.cluster.checkpoints.append(self.step)
        self.world.note(f"checkpoint {self} {self.step}")
        self._turn()

    def values(self) -> dict[str, Any]:
        told = {"step": self.step, "resumed_step": self.resumed, "checkpointed_step": self.saved}
        return {**told, "paused": self.paused}

    def command(self, command: AnyCommand) -> Message:
        if isinstance(command, HandOverRows):
            return Rows(*self._log.hand_over(command.after))  # type: ignore[arg-type]
        if isinstance(command, WriteCheckpoint):
            self.is_asked = True
            return StepsDone(self.step)
        if isinstance(command, Pause | Unpause):
            self.paused = isinstance(command, Pause)
            return PauseState(self.paused)
        return Done()

    def ask_to_end(self) -> None:
        """It ends behind the step in progress; one that still starts has nothing to write."""
        self.is_ending = True
        if self.state == ServiceState.STARTING:
            self.after(LOOK_S, self.end)


KINDS: Mapping[str, type[Life]] = {"buffer": Buffer, "rollout": Rollout, "learner": Learner}


def make_life(cluster: PlayedCluster, spec: ServiceSpec, number: int) -> Life:
    """Return a life of the kind that the service's name says."""
    return KINDS.get(kind_of(spec.name), Life)(cluster, spec, number)
