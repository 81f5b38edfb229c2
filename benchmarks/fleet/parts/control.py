"""A run's control plane for a fleet of any size: the real supervisor, whose services are made up.

Owns the services' words and the clock. The processor time of the supervisor's thread counts: its pulses, in
which it starts, hears, judges and repairs services and records rows, and the snapshots that its API gives
as JSON to `asyncrl status` and as a view to the page. Ray's calls and the rows' disk are not in it.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Collection, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.control.record.rundir import RunDir
from asyncrl.control.roster import Roster, ServiceSpec
from asyncrl.control.rows.recorder import Recorder
from asyncrl.control.snapshot import values_of
from asyncrl.control.supervisor import PULSE_S, Supervisor
from asyncrl.core.config.tree import Config
from asyncrl.core.rpc.message import Done
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service_command import A, Command, HandOverRows, Rows
from asyncrl.core.states import ServiceState
from asyncrl.core.status.replica import EngineStatus, ReplicaStatus, RewardStatus
from asyncrl.core.status.service import (
    BufferStatus,
    CoordinatorStatus,
    JournalStatus,
    LearnerStatus,
    MemberStatus,
    PendingTickets,
    PublisherStatus,
    ReceiverStatus,
    ServiceStatus,
    kind_of,
)
from asyncrl.core.status.statuses import Statuses
from asyncrl.page.view import view_of
from benchmarks.fleet.parts.sync import SteppedRuntime

SETTLING_PULSES = 4
LOST_SHARE = 8
"""One replica of so many is lost at once: those of a node or two."""
SECTIONS: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}


class ControlFleet:
    """A supervisor of `num_replicas`; `run` has it watch over them, and returns what that takes.

    Attributes:
        pulse_s, view_s: Processor seconds of each pulse while nothing happens, and of each snapshot after it.
        loss_s: Of each pulse in which replicas are lost and started again.
    """

    def __init__(self, num_replicas: int, num_pulses: int, num_losses: int) -> None:
        self.pulse_s, self.view_s, self.loss_s = list[float](), list[float](), list[float]()
        self.num_lost = max(1, num_replicas // LOST_SHARE)
        self._folder = tempfile.TemporaryDirectory(prefix="asyncrl-bench-")
        folder = Path(self._folder.name)
        (folder / "logs").mkdir()
        self._runtime, self._launcher = SteppedRuntime(), MadeUpServices(num_replicas)
        sizes = {"rollout": {"replicas": num_replicas}, "learner": {"steps": 1 << 40}}
        config = Config.model_validate(SECTIONS | sizes)
        roster = Roster(config, folder, "bench", folder, "")
        recorder = Recorder(RunDir(folder).metrics, self._runtime)
        self._supervisor = Supervisor(roster, self._launcher, recorder, self._runtime, NoProcesses())
        self._supervisor.summarise = lambda *_: None
        self._num_pulses, self._num_losses = num_pulses, num_losses

    def run(self) -> None:
        """Watch over the fleet as long as that takes, then end it."""
        logging.disable(logging.CRITICAL)  # each loss is a warning
        try:
            self._supervisor.run(Pulses(self._measure()))
        finally:
            logging.disable(logging.NOTSET)
            self._folder.cleanup()

    def _measure(self) -> Iterator[None]:
        """Go on by one pulse of the supervisor at each `yield`."""
        for _ in range(SETTLING_PULSES):
            yield from self._pulse()
        for _ in range(self._num_pulses):
            self.pulse_s.append((yield from self._pulse()))
            self.view_s.append(self._look())
        for _ in range(self._num_losses):
            self._launcher.lose(self.num_lost)
            self.loss_s.append((yield from self._pulse()))
            for _ in range(SETTLING_PULSES):
                yield from self._pulse()

    def _pulse(self) -> Generator[None, None, float]:
        self._runtime.now_s += PULSE_S
        began_s = time.thread_time()
        yield
        return time.thread_time() - began_s

    def _look(self) -> float:
        began_s = time.thread_time()
        snapshot = self._supervisor.snapshot()
        json.dumps(values_of(snapshot))
        json.dumps(view_of(snapshot))
        return time.thread_time() - began_s


class Pulses(ThreadEvent):
    """The supervisor's event of a stop: each of its waits goes on with what measures, whose end stops it."""

    def __init__(self, steps: Iterator[None]) -> None:
        super().__init__()
        self._steps = steps

    def wait(self, timeout: float | None = None) -> bool:
        if next(self._steps, self) is self:
            self.set()
        return self.is_set()


class NoProcesses:
    """A kernel with nothing of the run: its services are made up."""

    def look(self, now: float) -> None:
        """Nothing has changed."""

    def recent(self, now: float) -> str:
        return ""

    def stopped_services(self, run_id: str) -> set[str]:
        return set()

    def end_service(self, run_id: str, name: str, others: Collection[int]) -> list[int]:
        return []

    def remove_segments(self, run_id: str, name: str) -> None:
        """There are none."""


class MadeUpServices:
    """A launcher of services that answer at once, go on from look to look, and die when told to."""

    def __init__(self, num_replicas: int) -> None:
        self._num_looks = self._num_lost = 0
        self._living: set[str] = set()
        self._lost: set[str] = set()
        self._ended: set[str] = set()
        self._members = {f"receiver.{index}": MEMBER for index in range(num_replicas)}
        self._leases = {f"rollout.{index}": 2 for index in range(num_replicas)}

    def lose(self, number: int) -> None:
        """Have the processes of so many engines be gone; others at each call."""
        names = [name for name in self._leases if name in self._living]
        first = self._num_lost % len(names)
        self._lost |= {*(names[first:] + names[:first])[:number]}
        self._num_lost += number

    def start(self, spec: ServiceSpec) -> None:
        self._living.add(spec.name)

    def statuses(self, names: Iterable[str], deadline_s: float) -> Statuses:
        self._num_looks += 1
        by_kind = self._make_statuses()
        gone = ServiceStatus(state=ServiceState.DEAD, error="it was killed")
        ended = ServiceStatus(state=ServiceState.ENDED)
        return Statuses(
            {
                name: gone if name in self._lost else ended if name in self._ended else by_kind[kind_of(name)]
                for name in names
            }
        )

    def command(self, name: str, command: Command[A], deadline_s: float) -> A:
        told: Any = Done()
        if isinstance(command, HandOverRows):
            row = {"training/global_step": command.after + 1, "timing_s/step": 1.0, "timing_s/wait": 0.1}
            told = Rows(command.after, (row,))
        return told  # type: ignore[no-any-return]

    def stop(self, names: Iterable[str], deadline_s: float) -> set[str]:
        ended = set(names)
        self._ended |= ended
        return ended

    def kill(self, name: str) -> None:
        self._living.discard(name)
        self._lost.discard(name)

    def adopt(self) -> set[str]:
        return set(self._living)

    def _make_statuses(self) -> dict[str, ServiceStatus]:
        step, state = self._num_looks, ServiceState.READY
        engine = EngineStatus(
            in_flight_requests=16,
            tokens=1000 * step,
            trajectories=step,
            busy_s=0.2 * step,
            idle_by_cause={"lease": 0.01 * step, "swap": 0.04 * step},
            swaps=step,
            last_swap_s=0.5,
        )
        replica = ReplicaStatus(
            state=state,
            version=step,
            step=step,
            standby=False,
            in_flight_groups=2,
            counters={},
            engine=engine,
            reward=RewardStatus(parts={"gsm8k": (step, 0.5 * step)}),
            node="n",
        )
        learner = LearnerStatus(
            state=state,
            step=step,
            resumed_step=0,
            last_evaluation=0,
            paused=False,
            torn=(),
            checkpointed_step=0,
            findings=(),
        )
        return {
            "rollout": replica,
            "receiver": ReceiverStatus(state=state, address="", version=step, node="n"),
            "learner": learner,
            "publisher": PublisherStatus(state=state, address="", version=(step, step)),
            "buffer": self._make_buffer(step),
            "weight_sync": self._make_coordinator(step),
        }

    def _make_buffer(self, step: int) -> BufferStatus:
        return BufferStatus(
            state=ServiceState.READY,
            address="",
            paused=False,
            issued=16 * step,
            trained=16 * step,
            dropped={},
            pending=PendingTickets(),
            prompts_drawn=16 * step,
            stored_groups=0,
            steps_trained=step,
            last_version=step,
            token=1,
            leases=self._leases,
            reissues={},
            checkpoints=(),
            evaluations=(),
            evaluations_pending=0,
            parked=0,
            journal=JournalStatus(),
            counters={},
            given_up=0,
            open=0,
            residue=0,
            memory_bytes=0,
            num_prompts=1000,
            lineage=0,
        )

    def _make_coordinator(self, step: int) -> CoordinatorStatus:
        return CoordinatorStatus(
            state=ServiceState.READY,
            address="",
            token=1,
            version=(step, step),
            digest="",
            num_bytes=1,
            round=None,
            rounds=(),
            last_round_s=1.0,
            longest_round_s=1.0,
            culprit="",
            counters={},
            members=self._members,
        )


MEMBER = MemberStatus(
    state=ServiceState.READY,
    version=1,
    staged=0,
    swapping=0,
    fenced=False,
    pinned=False,
    served_alone=False,
    last_round_s=1.0,
    last_swap_s=1.0,
    error="",
)
