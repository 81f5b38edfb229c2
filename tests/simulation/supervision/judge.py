"""Promises of a supervisor, checked at the played services and in the run's files, never by its counters."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.control.record.events import load_events
from asyncrl.control.record.outcome import Outcome, read_outcome
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.states import RunState, ServiceState
from tests.simulation.kernel.runtime import EPOCH_S
from tests.simulation.kernel.world import World
from tests.simulation.supervision.scenario import CORE, Scenario

if TYPE_CHECKING:
    from tests.simulation.supervision.cluster import PlayedCluster
    from tests.simulation.supervision.services import Life, Rollout

MAX_RESTARTS = 3
GRACE_S = 15.0
ILL_S = {"gone": 80.0, "halted": 40.0, "silent": 90.0, "starting": 150.0}
"""Within which a service that every run has is started again, by how it is ill."""
PAUSE_S, CUT_OFF_S = 10.0, 30.0
SEEN_S = 3.0
"""Within which a supervisor sees that a replica has come up."""
SUPERVISOR = "supervisor.0"
FORGONE = re.compile(r"goes on with (\d+) replicas and (\d+) that stand by")


def unit_of(name: str) -> str:
    """Return the name of what falls with a service."""
    return name.replace("receiver", "rollout")


class SupervisionJudge:
    """See the module.

    Attributes:
        wanted: Numbers of replicas that may be wanted: two while it is not known whether one was taken.
        promised: Steps for which a checkpoint was promised.
        paused_at: When the run was paused, None while it is not.
        has_ended: The supervisor has ended by itself. was_stopped: The operator had it stop.
        done_at_stop: By the number of a learner's life, its step as the operator asked.
        was_full, ended_full: The disk was full for a while, or is at the end.
    """

    def __init__(self, world: World, scenario: Scenario, folder: Path) -> None:
        self.world, self._run_dir = world, RunDir(folder)
        self.broken: list[str] = []
        self.wanted, self.wanted_standby = {scenario.replicas}, scenario.standby
        self.was_zero = False
        self.promised: list[int] = []
        self.paused_at: float | None = None
        self.has_ended = self.was_stopped = self.was_full = self.ended_full = False
        self._blown_until: Counter[str] = Counter()
        self.blows: Counter[str] = Counter()
        self.cursed: set[str] = set()
        self.deaths: list[tuple[str, float]] = []
        self._removed: set[str] = set()
        self.steps: set[int] = set()
        self.unsaved = ""
        self._is_ending = False
        self._cut_off: list[tuple[float, str]] = []
        self._starts: list[tuple[str, float]] = []
        self.done_at_stop: dict[int, int] = {}
        self._ill_since: dict[str, tuple[str, float]] = {}

    def say(self, sentence: str) -> None:
        """Take down a broken promise, once."""
        if sentence not in self.broken:
            self.broken.append(sentence)
            self.world.note(f"broken {sentence}")

    # --- hearing ----------------------------------------------------------------------------------

    def hear_blow(self, name: str, seconds: float = 0.0) -> None:
        """A fault befalls a service."""
        self.blows[unit_of(name)] += 1
        if name == SUPERVISOR:  # its successor hears of everybody anew
            self._ill_since.clear()
        self._blown_until[unit_of(name)] = max(self._blown_until[unit_of(name)], self.world.now + seconds)

    def hear_death(self, life: Life) -> None:
        """A life ends, not by order."""
        self.hear_blow(life.name)
        if unit_of(life.name) not in self._removed:  # else its supervisor has ended the replica already
            self.deaths.append((life.name, self.world.now))

    def hear_start(self, name: str, before: Life | None, cluster: PlayedCluster) -> None:
        """A service is to be started."""
        if before is not None and before.is_alive:
            self.say(f"lives: {name} is started while {before} lives")
        self._starts.append((name, self.world.now))
        self._removed.discard(unit_of(name))
        if self.has_ended or self._run_dir.outcome.exists():
            self.say(f"end: {name} is started after the end")
        buffer = cluster.lives.get("buffer.0")
        is_heard = buffer is not None and buffer.is_working and self._is_well("buffer.0", SUPERVISOR)
        if name in cluster.leases and is_heard:
            self.say(f"leases: {name} is started, and what its last life held is not issued again")

    def hear_step(self, life: Life, step: int) -> None:
        """The learner has trained a step."""
        self.steps.add(step)
        self.world.note(f"step {life} {step}")
        now = self.world.now
        is_well = self._is_well("learner.0", "buffer.0", SUPERVISOR)
        if self.paused_at is not None and now - self.paused_at > PAUSE_S and is_well:
            self.say("pause: a step was trained in a paused run")
        if self._cut_off and now - self._cut_off[0][0] > CUT_OFF_S:
            self.say(self._cut_off.pop(0)[1])

    def _is_well(self, *units: str) -> bool:
        """Tell whether no fault has befallen them for a while."""
        return all(self.world.now > self._blown_until.get(one, -GRACE_S) + GRACE_S for one in units)

    def hear_replica_removal(self, life: Rollout) -> None:
        """A replica's process is ended by the supervisor: one that works drains first, if the run goes on."""
        self._removed.add(life.name)
        is_known = self.world.now - life.ready_at > SEEN_S
        if life.is_working and is_known and self._is_well(life.name) and not self.was_stopped:
            self._cut_off.append((self.world.now, f"drain: {life} was ended while it worked"))

    def hear_removal(self, life: Life, step: int, saved: int) -> None:
        """The learner's process is ended by the supervisor."""
        done = min(step, self.done_at_stop.get(life.number, step if not self.was_stopped else 0))
        is_well = life.is_alive and not life.is_silent and life.state != ServiceState.FAILED
        if is_well and life.state != ServiceState.ENDED and done > saved:
            self.unsaved = f"stop: {life} was ended, had done step {done} before, and had saved step {saved}"

    # --- looking ----------------------------------------------------------------------------------

    def look(self, cluster: PlayedCluster, is_supervised: bool) -> None:
        """Judge how long services that every run has are ill."""
        learner = cluster.lives.get("learner.0")
        self._is_ending |= learner is not None and learner.state == ServiceState.ENDED
        for name in CORE:
            life = cluster.lives.get(name)
            kind, number = _illness(life), 0 if life is None else life.number
            if not kind or not is_supervised or self.was_stopped or self._is_ending:
                self._ill_since.pop(name, None)
                continue
            known, since = self._ill_since.setdefault(name, (f"{kind} {number}", self.world.now))
            if known != f"{kind} {number}":
                self._ill_since[name] = (f"{kind} {number}", self.world.now)
            elif self.world.now - since > ILL_S[kind]:
                self.say(f"back: {name} has been {kind} for {ILL_S[kind]:g} s")

    def unsettled(self, cluster: PlayedCluster) -> str:
        """Return what keeps the run from being as it is wanted, "" if nothing does."""
        if self.was_stopped:
            return "it was stopped, and has not ended"
        for name in CORE:
            if not cluster.works(name):
                return f"{name} does not work"
        replicas = {name: one for name, one in cluster.lives.items() if name.startswith("rollout.")}
        if broken := [name for name, one in replicas.items() if not one.is_working]:
            return f"{broken} do not work"
        standbys = [name for name, one in replicas.items() if one.is_standby]  # type: ignore[attr-defined]
        wanted, standby = self._wanted()
        found = len(replicas) - len(standbys), len(standbys)
        if found[0] not in wanted or found[1] != standby:
            return f"replicas: {found} are there, {sorted(wanted)} and {standby} are wanted"
        receivers = {name for name in cluster.lives if name.startswith("receiver.")}
        if receivers != {name.replace("rollout", "receiver") for name in replicas}:
            return f"receivers: {sorted(receivers)} for {sorted(replicas)}"
        return ""

    def _wanted(self) -> tuple[set[int], int]:
        """Return the numbers that are wanted; a run may have gone on without a replica."""
        if not self.cursed:
            return self.wanted, self.wanted_standby
        events = load_events(self._run_dir.events)
        told = [found for one in events if (found := FORGONE.search(str(one["text"])))]
        if not told:
            return self.wanted, self.wanted_standby
        return {int(told[-1][1])}, int(told[-1][2])

    def unkept(self, cluster: PlayedCluster) -> str:
        """Return which checkpoint was promised and is not written, "" if none."""
        newest = max(cluster.checkpoints, default=-1)
        if self.promised and newest < max(self.promised) and not self.was_zero:
            return f"checkpoint: one of step {max(self.promised)} was promised, the newest is of {newest}"
        return ""

    # --- the end ----------------------------------------------------------------------------------

    def judge_end(self, cluster: PlayedCluster) -> None:
        """Judge what a run has left."""
        if living := sorted(name for name, life in cluster.lives.items() if life.is_alive):
            self.say(f"end: {living} still run")
        outcome = read_outcome(self._run_dir)
        if outcome is None:
            if not self.ended_full:  # the room that was reserved for it cannot be played
                self.say("end: there is no outcome")
            return
        self.world.note(f"outcome {outcome.state} {outcome.service}")
        if outcome.state == RunState.FAILED:
            self._judge_failure(outcome)
        else:
            self._judge_good_end(outcome, cluster)
        self._judge_events()

    def _judge_failure(self, outcome: Outcome) -> None:
        name = unit_of(outcome.service)
        blows = self.blows[name] + (self.blows["buffer.0"] if name == "learner.0" else 0)
        is_due = name in self.cursed or blows > MAX_RESTARTS or (self.was_stopped and blows)
        if not is_due and not ("has never worked" in outcome.error and blows > 1):
            self.say(f"failed: the run failed for {outcome.service} after {blows} blows: {outcome.error}")

    def _judge_good_end(self, outcome: Outcome, cluster: PlayedCluster) -> None:
        if self.unsaved:
            self.say(self.unsaved)
        if outcome.state == RunState.FINISHED and (sentence := self.unkept(cluster)):
            self.say(sentence)
        if outcome.state == RunState.STOPPED and not self.was_stopped:
            self.say("end: the run was stopped by nobody")
        lines = self._run_dir.metrics.read_text().splitlines()
        rows = {json.loads(line)["training/global_step"] for line in lines}
        if (lost := sorted(self.steps - rows)) and not self.was_full:
            self.say(f"rows: those of steps {lost} are not on record")

    def _judge_events(self) -> None:
        """Each death that a start of the same name follows is told before that."""
        if self.was_full and self.blows[SUPERVISOR]:
            return  # what the disk did not take died with the supervisor
        events = load_events(self._run_dir.events)
        told = [(str(one["kind"]), unit_of(str(one["service"])), float(str(one["time"]))) for one in events]
        for name, at in self.deaths:
            unit, began = unit_of(name), EPOCH_S + at
            later = [EPOCH_S + time for who, time in self._starts if who == name and time >= at]
            exits = [time for kind, who, time in told if kind == "exit" and who == unit and time >= began]
            if later and not (exits and exits[0] <= later[0]):
                self.say(f"told: the end of {name} at {at:.1f} s is not among the events")


def _illness(life: Life | None) -> str:
    """Return how a service is ill, "" if it is not."""
    if life is None or not life.is_alive or life.state == ServiceState.FAILED:
        return "gone"
    if life.is_silent and life.has_come_up:
        return "halted" if life.is_halted else "silent"
    return "starting" if life.state == ServiceState.STARTING else ""
