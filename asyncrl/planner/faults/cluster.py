"""A whole run in virtual time: builds its services, and does to them what the scenario says.

Owns who lives under which name, and what outlives processes: the journal's disk, checkpoints, the
coordinator's files and shared memory. Decides nothing about the run: that is the supervisor's.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable

from asyncrl.buffer.ledger.orders import PromptOrder, Source
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.core import wire
from asyncrl.planner.faults.ambush import Ambush
from asyncrl.planner.faults.checks.observer import Observer
from asyncrl.planner.faults.kernel.process import Process
from asyncrl.planner.faults.network import FaultyNetwork, Window
from asyncrl.planner.faults.scenario import AMBUSH, NUM_HELD_OUT, WEATHERS, Scenario, Strike
from asyncrl.planner.faults.services.buffer import BufferProcess
from asyncrl.planner.faults.services.evaluation import HeldOut
from asyncrl.planner.faults.services.journal import Disk
from asyncrl.planner.faults.services.learner import LearnerDisk, LearnerPlan, LearnerProcess
from asyncrl.planner.faults.services.replica import ReplicaPlan, ReplicaProcess
from asyncrl.planner.faults.services.supervisor import Supervisor
from asyncrl.planner.faults.settling import find_unsettled
from asyncrl.planner.faults.sync.carriage import Carriage
from asyncrl.planner.faults.sync.coordinator import CoordinatorFiles, CoordinatorProcess
from asyncrl.planner.faults.sync.liaison import COORDINATOR
from asyncrl.planner.faults.sync.publisher import PublisherProcess
from asyncrl.planner.faults.sync.receiver import ReceiverProcess
from asyncrl.planner.world import Message, World
from weight_sync.memory import segments
from weight_sync.protocol.rounds import Timing

NUM_PROMPTS = 17
MAX_GROUP_BYTES = 8192
LEASE_S = 4.0
TIMING = Timing(deadline_s=6.0, offer_s=1.5, settle_s=0.75, silence_s=2.0, dead_s=12.0)
RECOUNT_S, LOOK_S = 2.0, 0.5
UNTOLD, MAX_SAID = frozenset({"replica", "name", "incarnation", "abilities", "store_host", "store_port"}), 300
RESTART_S = 1.5
"""Until a supervisor that was killed is there again."""


class TracedWorld(World):
    """A world that tells of every message that arrives."""

    def __init__(self, seed: int, network: FaultyNetwork, note: Callable[[str, Message], None]) -> None:
        super().__init__(seed, network)
        self._note = note

    def _arrive(self, src: str, dst: str, message: Message) -> None:
        self._note(f"{src} > {dst} {message.op} #{message.call}", message)
        super()._arrive(src, dst, message)


class Cluster:
    """See the module.

    Attributes:
        lines: The trace, if it is kept.
        unsettled: What keeps the run from being over, "" once it is.
    """

    def __init__(self, scenario: Scenario, keeps_trace: bool = False) -> None:
        self.scenario = scenario
        self.lines: list[str] = []
        self._keeps_trace = keeps_trace
        self._digest = hashlib.blake2b(digest_size=8)
        self.network = FaultyNetwork(scenario.seed)
        self.world: World = TracedWorld(scenario.seed, self.network, self.note)
        self.settings = _settings_of(scenario)
        prompt_at = PromptOrder(scenario.seed, (Source(NUM_PROMPTS),), True).at
        has_unusable = scenario.unusable >= 0
        self.observer = Observer(scenario.max_lag, prompt_at, NUM_HELD_OUT, has_unusable=has_unusable)
        self.disk, self.learner_disk, self.files = Disk(), LearnerDisk(), CoordinatorFiles()
        self._dice = random.Random(f"cluster/{scenario.seed}")
        self._number = 0
        self._bound: dict[str, Process] = {}
        self._everybody: list[Process] = []
        self._unseen: set[str] = set()
        self._twins: list[Process] = []
        self._ghosts: list[Process] = []
        self._lives: dict[str, int] = {}
        self._hosts: dict[str, int] = {}
        self._prefix = f"asyncrl-sim{os.getpid()}-{id(self)}-"
        self._carriage = Carriage(self.world, self)
        self.supervisor = Supervisor(self, scenario.replicas)
        self._is_dark = False
        self.unsettled = "nothing has begun"
        self._ambush = Ambush(self.world, scenario.seed, self._kill, self._forsake)

    # --- what processes ask for -------------------------------------------------------------------

    def address(self, service: str) -> str | None:
        """Return who answers for a service; of two coordinators that live, either may have the address."""
        process = self._bound.get(service)
        twins = [one for one in self._twins if one.service == service and one.is_alive]
        if twins and process is not None and self._dice.random() < 0.5:
            process = twins[-1]
        return process.name if process is not None and process.is_alive else None

    def is_up(self, pid: str) -> bool:
        """Tell whether a process lives."""
        actor = self.world.actors.get(pid)
        return actor is not None and actor.is_alive

    def next_number(self) -> int:
        """Return a number that was never given before."""
        self._number += 1
        return self._number

    def note(self, text: str, detail: Message | str = "") -> None:
        """Write a line into the trace; the detail may differ elsewhere, and is not in its digest."""
        line = f"{self.world.now:10.4f} {text}"
        self._digest.update(line.encode())
        if self._keeps_trace:
            self.lines.append(f"{line} {_read(detail) if isinstance(detail, Message) else detail}".rstrip())

    def pass_point(self, process: Process, point: str) -> None:
        """A replica has come to a moment of an evaluation."""
        self.note(f"{process.name}: {point}")
        self.observer.tally[f"evaluations/{point}"] += 1
        self._ambush.pass_point(process, point)
        if point == "pinned" and process in self._ghosts and process.service in self._bound:
            self.world.after(0.0, self.bury, process)

    @property
    def digest(self) -> str:
        """Of the trace so far."""
        return self._digest.hexdigest()

    def can_reach(self, one: Process, other: Process) -> bool:
        """Tell whether bytes pass between two processes."""
        return self.network.can_reach(one.name, other.name, self.world.now)

    def garble(self, process: Process, bucket: bytes) -> bytes:
        """Return what arrives of a bucket."""
        return self.network.garble(bucket, self.world.now)

    # --- what the supervisor asks for -------------------------------------------------------------

    def find(self, service: str) -> Process | None:
        """Return the process under the name, dead or alive."""
        return self._bound.get(service)

    def known(self) -> list[str]:
        """Return the services that have a process."""
        return [name for name, process in self._bound.items() if process.is_alive]

    def is_seen(self, process: Process) -> bool:
        """Tell whether the supervisor hears of it."""
        return process.name not in self._unseen

    def start(self, service: str) -> None:
        """Start a process; the first one of a kind takes longer."""
        self._lives[service] = self._lives.get(service, 0) + 1
        process = self._bound[service] = self._make(service, self._dice.uniform(0.2, 1.0))
        self._everybody.append(process)
        self.note(f"start {process.name}")
        self.world.start(process)

    def end(self, service: str) -> None:
        """Kill a process; one that cannot be reached lives on, and its successor is on another host."""
        process = self._bound.pop(service, None)
        if process is not None and process.name in self._unseen:
            self._hosts[service] = self._hosts.get(service, 0) + 1
            self._twins += [process] if service == COORDINATOR else []
        elif process is not None:
            self.bury(process)
        buffer = self._bound.get("buffer.0")
        if service.startswith("rollout.") and isinstance(buffer, BufferProcess) and buffer.is_alive:
            buffer.retire(service)

    def drain(self, index: int) -> None:
        """Tell a replica to leave."""
        process = self._bound.get(f"rollout.{index}")
        if isinstance(process, ReplicaProcess) and process.is_alive:
            process.after(0.0, process.drain)

    def bury(self, process: Process) -> None:
        """A process is dead: whoever waits for it hears that its connection broke."""
        if not process.is_alive:
            return
        self.note(f"dead {process.name}")
        self.world.kill(process.name)
        process.is_alive = False
        process.close()
        for other in list(self.world.actors.values()):
            if isinstance(other, Process):
                other.after(self.world.random.uniform(0.0, 0.02), other.lose, process.name)

    # --- services ---------------------------------------------------------------------------------

    def _make(self, service: str, start_s: float) -> Process:
        kind, _, index = service.partition(".")
        host = f"{self._prefix}h{self._hosts.get(service, 0)}-"
        observer, scenario = self.observer, self.scenario
        if kind == "buffer":
            return BufferProcess(
                self,
                self.settings,
                self.disk,
                observer,
                group_size=scenario.group_size,
                is_always_synced=scenario.is_always_synced,
                start_s=start_s,
            )
        if kind == "weight_sync":
            return CoordinatorProcess(self, TIMING, scenario.parallelism, self.files, start_s)
        if kind == "publisher":
            return PublisherProcess(self, host, self._carriage, observer, start_s)
        if kind == "receiver":
            lost_s = TIMING.silence_s + TIMING.poll_s
            return ReceiverProcess(self, int(index), host, self._carriage, observer, lost_s, start_s)
        if kind == "learner":
            plan = _learner_plan(scenario, start_s)
            return LearnerProcess(self, plan, self.learner_disk, observer, self._prompt_of)
        return ReplicaProcess(self, int(index), _replica_plan(scenario, start_s), observer)

    def _prompt_of(self, ticket: int) -> tuple[int, int, int]:
        return self.observer.recount(self.disk, None).tickets[ticket].prompt

    # --- the run ----------------------------------------------------------------------------------

    def run(self, until_s: float) -> bool:
        """Let the run happen; return whether it came to its end in time."""
        for strike in self.scenario.strikes:
            self.world.at(strike.at, self._strike, strike)
        self.supervisor.begin()
        self.world.after(RECOUNT_S, self._recount)
        self.world.after(LOOK_S, self._look_whether_over)
        self.world.run(lambda: not self.unsettled or self.supervisor.given_up is not None, until_s)
        return not self.unsettled

    def _look_whether_over(self) -> None:
        if self._has_learned:
            evaluations = self.observer.recount(self.disk, None).evaluations
            self.unsettled = find_unsettled(self._bound, evaluations)
        else:
            self.unsettled = "the learner has not ended"
        self.world.after(LOOK_S, self._look_whether_over)

    @property
    def _has_learned(self) -> bool:
        learner = self._bound.get("learner.0")
        return learner is not None and learner.state == "ENDED" and learner.is_alive

    def check_end(self) -> None:
        """Compare what the journal says of the run with the weights that came out of it."""
        buffer = self._bound.get("buffer.0")
        census = buffer.census() if isinstance(buffer, BufferProcess) and buffer.is_alive else None
        if census is not None:
            self.observer.finished(self.learner_disk.last_node, self.disk, census)

    def _recount(self) -> None:
        buffer = self._bound.get("buffer.0")
        census = buffer.census() if isinstance(buffer, BufferProcess) and buffer.is_alive else None
        self.observer.recount(self.disk, census)
        self.world.after(RECOUNT_S, self._recount)

    def close(self) -> None:
        """Free what processes hold and shared memory."""
        for process in self._everybody:
            process.is_alive = False
            process.close()
            process.end_tasks()
        segments.unlink_all(self._prefix)

    # --- faults -----------------------------------------------------------------------------------

    def _strike(self, strike: Strike) -> None:
        self.note(f"FAULT {strike}")
        now, end = self.world.now, self.world.now + strike.seconds
        if strike.kind in WEATHERS:
            self.network.add(Window(strike.kind, now, end, strike.amount))
        elif strike.kind == "part":
            one, _, other = strike.target.partition("|")
            self.network.add(Window("part", now, end, 1.0, (one, other)))
        else:
            strikes: dict[str, Callable[[Strike], None]] = {
                AMBUSH: self._ambush.lay,
                "kill": lambda one: self._kill(one.target),
                "stop": self._stop,
                "twin": self._make_twin,
                "slow": self._slow,
                "journal away": self._take_journal_away,
                "damage payload": self._damage_payload,
                "damage checkpoint": self._damage_checkpoint,
                "power cut": self._cut_power,
                "scale": lambda one: self.supervisor.want(int(one.amount)),
                "leave": lambda one: self.supervisor.let_leave(int(one.amount)),
            }
            strikes[strike.kind](strike)

    def _kill(self, service: str) -> None:
        if service == "supervisor":
            self.supervisor.die()
            self.world.after(RESTART_S, self._revive_supervisor)
        elif (process := self._bound.get(service)) is not None and process.state != "ENDED":
            self.bury(process)

    def _forsake(self, service: str, lives_on_s: float) -> None:
        """The launcher calls a process dead that lives on for a while, at the address of its successor."""
        if (process := self._bound.get(service)) is not None and process.is_alive:
            self.note(f"ghost {process.name}")
            del self._bound[service]
            self._ghosts.append(process)
            self.world.after(lives_on_s, self.bury, process)

    def _revive_supervisor(self) -> None:
        if not self._is_dark:
            self.supervisor.begin()

    def _stop(self, strike: Strike) -> None:
        if (process := self._bound.get(strike.target)) is not None and process.is_alive:
            process.stop()
            self.world.after(strike.seconds, process.thaw)

    def _slow(self, strike: Strike) -> None:
        if (process := self._bound.get(strike.target)) is not None:
            process.slowness = strike.amount
            self.world.after(strike.seconds, setattr, process, "slowness", 1.0)

    def _make_twin(self, strike: Strike) -> None:
        """The supervisor hears nothing of a process or a node, which work on until somebody ends them."""
        index = strike.target.partition(".")[2]
        together = {"rollout": [strike.target, f"receiver.{index}"], "node": ["learner.0", "publisher.0"]}
        names = together.get(strike.target.partition(".")[0], [strike.target])
        for process in [self._bound[name] for name in names if name in self._bound]:
            self._unseen.add(process.name)
            self.world.after(strike.seconds, self._end_twin, process)

    def _end_twin(self, process: Process) -> None:
        self._unseen.discard(process.name)
        if self._bound.get(process.service) is not process:
            self.bury(process)

    def _take_journal_away(self, strike: Strike) -> None:
        self.disk.is_away = True
        self.world.after(strike.seconds, setattr, self.disk, "is_away", False)

    def _damage_payload(self, strike: Strike) -> None:
        self.disk.damage(self._dice)

    def _damage_checkpoint(self, strike: Strike) -> None:
        steps = sorted(self.learner_disk.checkpoints)
        if len(steps) > 1:  # an older one is left to go back to
            self.learner_disk.checkpoints[steps[-1]].is_whole = False

    def _cut_power(self, strike: Strike) -> None:
        """The machine goes dark: every process ends, and what was not synced is lost."""
        if self._has_learned:
            return  # nobody starts a learner again that has ended: that is for another run
        self._is_dark = True
        self.supervisor.die()
        for actor in list(self.world.actors.values()):
            if isinstance(actor, Process):
                self.bury(actor)
        self._unseen.clear()
        lost = self.disk.cut_power(self._dice)
        self.observer.power_was_cut(self.disk)
        segments.unlink_all(self._prefix)
        self.note(f"the power is cut, {lost} turns are lost")
        self.world.after(strike.seconds, self._light_up)

    def _light_up(self) -> None:
        self._is_dark = False
        self.supervisor.begin()


def _read(message: Message) -> str:
    """Return what a message says, for the trace."""
    if message.args.get("error") is not None:
        return f"{type(message.args['error']).__name__}: {message.args['error'].message}"
    fields = wire.unpack_header(message.args["header"])
    said = ", ".join(f"{name}={value}" for name, value in fields["args"].items() if name not in UNTOLD)
    return said[:MAX_SAID]


def _settings_of(scenario: Scenario) -> LedgerSettings:
    return LedgerSettings(
        run_seed=scenario.seed,
        groups_per_step=scenario.groups_per_step,
        max_lag=scenario.max_lag,
        ready_batches=scenario.ready_batches,
        memory_bytes=scenario.memory_batches * scenario.groups_per_step * MAX_GROUP_BYTES,
        max_group_bytes=MAX_GROUP_BYTES,
        lease_s=LEASE_S,
        max_attempts=3,
        policy=scenario.policy,
        max_wait_s=2.0,
        evaluation_parts=scenario.evaluation_parts,
    )


def _learner_plan(scenario: Scenario, start_s: float) -> LearnerPlan:
    return LearnerPlan(
        num_steps=scenario.num_steps,
        max_lag=scenario.max_lag,
        step_s=scenario.step_s,
        checkpoint_every=scenario.checkpoint_every,
        checkpoint_s=0.4,
        kept=3,
        start_s=start_s,
        rollbacks=frozenset(scenario.rollbacks),
        is_forking=scenario.is_forking,
        is_streaming=scenario.is_streaming,
        evaluate_every=scenario.evaluate_every,
    )


def _replica_plan(scenario: Scenario, start_s: float) -> ReplicaPlan:
    return ReplicaPlan(
        run_seed=scenario.seed,
        num_prompts=NUM_PROMPTS,
        group_size=scenario.group_size,
        max_groups=scenario.max_groups,
        mean_tokens=scenario.mean_tokens,
        lease_s=LEASE_S,
        start_s=start_s,
        held_out=HeldOut(NUM_HELD_OUT, scenario.mean_tokens, scenario.unusable),
        failing_loads=frozenset(scenario.failing_loads),
    )
