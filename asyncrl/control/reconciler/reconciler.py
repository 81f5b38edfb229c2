"""Reconciler: feeds service states to the fleet machine and has its actions performed.

Owns the machine, and decides nothing itself. Any thread may call. Invariant: the machine's decisions are
on disk before they are performed, so a supervisor that takes over finds every service that there may be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from asyncrl.control.api.operations import Begun
from asyncrl.control.fleet.machine import FleetMachine
from asyncrl.control.fleet.messages import (
    Begin,
    Drain,
    Effect,
    End,
    Event,
    Finish,
    GiveUp,
    Gone,
    Kill,
    Leave,
    Promote,
    Start,
    Tick,
    Wanted,
)
from asyncrl.control.fleet.rules import make_rules
from asyncrl.control.fleet.saved import SavedMachine, SavedUnit, dump, refuse_newer, restore
from asyncrl.control.fleet.units import LEARNER, key_of
from asyncrl.control.machine.kernel import Kernel, LinuxKernel
from asyncrl.control.ray.launcher import Launcher
from asyncrl.control.reconciler.actuator import COMMAND_DEADLINE_S, ServiceActuator
from asyncrl.control.reconciler.report import FleetReport
from asyncrl.control.reconciler.status_events import at_home, events_of, in_order
from asyncrl.control.record.events import EventLog, Kind
from asyncrl.control.record.outcome import Outcome
from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.control.roster import Roster
from asyncrl.core import service_command
from asyncrl.core.errors import ConfigError, ServiceFailed
from asyncrl.core.files.durable import replace_text
from asyncrl.core.rpc.message import fields_of
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.service_command import A, Command, Tighten
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ServiceStatus
from asyncrl.core.status.statuses import Statuses

log = logging.getLogger(__name__)

STATUS_DEADLINE_S = 1.0
LAST_STATUS_DEADLINE_S = 10.0
SAVED_EVERY_S = 10.0
"""While a unit waits for its start."""
ENDED_AT_ONCE = ("rollout", "receiver", "learner", "publisher", "weight_sync")
"""Services that have nothing to hand over before the first step of this start of the run."""


class SavedBound(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bound on lag that the buffer was told, None for the configured one."""

    max_lag: int | None = None


class SavedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """State that a supervisor needs when it takes over: `fleet.json`."""

    run_id: str
    bound: SavedBound
    ending: Outcome | None
    machine: SavedMachine


class FleetFile:
    """`fleet.json`. `write_error`: why it is not up to date, empty if it is: the disk is full."""

    def __init__(self, run_dir: Path) -> None:
        self.path = RunDir(run_dir).fleet
        self.write_error = ""
        self._settled: SavedFleet | None = None

    def read(self, run_id: str) -> SavedFleet | None:
        """Return the state that a supervisor of the run has left, None without one.

        Raises:
            ConfigError: A newer release has saved it.
        """
        found = read_json(self.path)
        if found is None or found.get("run_id") != run_id:
            return None
        refuse_newer(found.get("machine"))
        return msgspec.convert(found, SavedFleet)

    def write(self, state: SavedFleet) -> None:
        """Write the state if more than times has changed; a full disk is tried again at the next call."""
        settled = _without_ages(state)
        if settled == self._settled:
            return
        try:
            replace_text(self.path, msgspec.json.format(msgspec.json.encode(state)).decode())
            self._settled, self.write_error = settled, ""
        except OSError as error:
            self.write_error = f"{error}"


class FleetReconciler:
    """The services of a run.

    Attributes:
        report, file: The report on the services, as of the last pulse; the saved state.
        ending: The outcome of the run, once it is being ended. It stays on disk: a supervisor that is started
            after this one died in its last moments must not begin the run anew.
    """

    def __init__(
        self,
        roster: Roster,
        launcher: Launcher,
        events: EventLog,
        runtime: Runtime,
        kernel: Kernel | None = None,
    ) -> None:
        self._roster = roster
        self._launcher = launcher
        self._kernel = kernel or LinuxKernel()
        self._actuator = ServiceActuator(roster, launcher, events, self._kernel)
        self._events = events
        self._runtime = runtime
        self._lock = runtime.lock()
        self._rules = make_rules(roster.config, roster.config.learner.num_ranks, roster.num_publishers)
        self._machine = FleetMachine(self._rules, runtime.now())
        self.file = FleetFile(roster.run_dir)
        self.report = FleetReport(events)
        self._max_lag: int | None = None
        self._is_bound_told = False
        self._is_degraded = False
        self.ending: Outcome | None = None

    # --- reading --------------------------------------------------------------------------

    @property
    def given_up(self) -> GiveUp | None:
        """Reason for which the run must end, if it must."""
        return self._machine.given_up

    @property
    def learners(self) -> list[str]:
        with self._lock:
            return [name for name in self._machine.names if name.startswith("learner.")]

    @property
    def replicas(self) -> list[int]:
        """Indices of the replicas that lease or are to."""
        with self._lock:
            return sorted(unit.index for unit in self._machine.replicas)

    @property
    def num_draining(self) -> int:
        """Leaving replicas whose processes are still up."""
        with self._lock:
            return len(self._machine.leavers)

    @property
    def wanted(self) -> int:
        return self._machine.wanted

    @property
    def num_ready(self) -> int:
        """Replicas that lease."""
        with self._lock:
            return sum(unit.is_up for unit in self._machine.replicas)

    @property
    def is_degraded(self) -> bool:
        """As of the last pulse: a status is given while a pulse or the run's end takes its time."""
        return self._is_degraded

    @property
    def has_learner_ended(self) -> bool:
        """Whether its leader has ended by itself, be its process alive or not."""
        return self._machine.units[LEARNER].has_ended

    @property
    def is_learner_ending(self) -> bool:
        """Whether it was asked to end, by this supervisor or by one before it."""
        return self._machine.units[LEARNER].is_ending

    def num_restarts(self, name: str) -> int:
        """Return how often the unit of a service was started again."""
        with self._lock:
            unit = self._machine.units.get(key_of(name))
            return unit.num_restarts if unit else 0

    # --- commands -------------------------------------------------------------------------

    def begin(self, replicas: int, standby: int) -> bool:
        """Start every service; or take charge of those that a dead supervisor has left, and return True.

        Raises:
            ConfigError: A newer release has saved the state of the fleet.
        """
        with self._lock:
            if (found := self.file.read(self._roster.run_id)) is not None:
                self._take_over(found)
                return True
            log.info("starting %d replicas and %d that stand by", replicas, standby)
            self._events.add("start", "run", f"the run starts with {replicas} replicas", replicas=replicas)
            self._apply(Begin(replicas, standby))
            return False

    def scale(self, replicas: int, why: str = "") -> Begun:
        """Set the wanted number of replicas; `why` is the autoscaler's reason. Returns the begun actions."""
        with self._lock:
            self._refuse_if_ending()
            begun = self._describe_begun(self._apply(Wanted(replicas)))
        kind: Kind = "autoscale" if why else "scale"
        text = why or f"{replicas} replicas are wanted"
        told = fields_of(begun)
        self._events.add(kind, "rollout", text, **told)
        log.info("%s: %s", text, told)
        return begun

    def drain(self, index: int) -> Begun:
        """Let a replica drain and leave; another is started in its place."""
        with self._lock:
            self._refuse_if_ending()
            begun = self._describe_begun(self._apply(Leave(index)))
        told = {"started": begun.started, "draining": begun.draining}
        self._events.add("scale", f"rollout.{index}", f"rollout.{index} is to drain and leave", **told)
        return begun

    def ask(self, service: str, command: Command[A]) -> A:
        """Pass a command on to a service. Raises ServiceFailed or DeadlineExceeded."""
        with self._lock:
            is_there = service in self._machine.names
        if not is_there:
            raise ServiceFailed(f"{service} is not running and cannot '{command.word}'")
        answer = self._launcher.command(service, command, COMMAND_DEADLINE_S)
        if isinstance(command, Tighten):
            with self._lock:
                self._max_lag, self._is_bound_told = command.max_lag, True
                self._save()
        return answer

    def finish_learner(self) -> None:
        """Record, for good, that the learner is being ended; the caller makes it end."""
        with self._lock:
            self._apply(Finish())
            self._save()

    def dump_stacks(self) -> None:
        """Have every service write the stacks of all its threads into its log."""
        with self._lock:
            names = self._machine.names
        self._actuator.dump_stacks(names)

    def pulse(self) -> Statuses:
        """Poll all services, perform the resulting actions, and return the statuses."""
        with self._lock:
            run_id = self._roster.run_id
            heard = self._launcher.statuses(self._machine.names, STATUS_DEADLINE_S)
            self._kernel.look(self._runtime.now())
            found = {name: self._explained(at_home(run_id, name, status)) for name, status in heard.items()}
            for name, status in found.items():
                self._actuator.note_processes(name, status)
            events = events_of(run_id, Statuses(found), self._kernel.stopped_services)
            for name in _renewed_by(self._apply(*events, Tick())):
                found.pop(name, None)
            self._repeat_promotions(Statuses(found))
            self.report.tell_stages(self._machine)
            self._tell_bound()
            self._save()
            self.report.renew_facts(self._machine)
            self._is_degraded = self._machine.is_degraded or self._machine.is_short
            return self.report.complete(found, self._machine)

    def _explained(self, status: ServiceStatus) -> ServiceStatus:
        """Add the kernel's out-of-memory kills and refused processes to the reason why a service is gone."""
        why = self._kernel.recent(self._runtime.now())
        if not why or status.state not in (ServiceState.FAILED, ServiceState.DEAD):
            return status
        return msgspec.structs.replace(status, error=f"{status.error or 'it is gone'}; {why}")

    def stop(
        self, deadline_s: float, outcome: Outcome, *, has_work: bool = True
    ) -> tuple[set[str], Statuses]:
        """End every service, those that depend on others first; at once those that have nothing to hand over.

        Args:
            outcome: Of the run: a supervisor that takes over from here on only ends it.
            has_work: Something was trained. Before that only the buffer has anything that is worth a wait: an
                engine that compiles, or a learner that loads, does not hear what it is asked for minutes.

        Returns:
            Who had to be killed, and each service's last status: the account after the last event.
        """
        with self._lock:  # let go then: nothing is begun any more, and others may ask meanwhile
            self.ending = outcome
            self._save()
            suspect_s, silence_of = self._machine.rules.suspect_s, self._machine.silence_of
            left = {name: (silence_of(name) or 0.0) <= suspect_s for name in self._machine.names}
            useless = {name for name in left if not self._machine.has_come_up(name)}
            if not has_work:
                useless |= {name for name in left if name.split(".")[0] in ENDED_AT_ONCE}
        unstopped: set[str] = set()
        statuses = Statuses()
        for kinds in (("rollout", "learner"), ("receiver", "publisher"), ("weight_sync", "buffer")):
            names = [name for name in left if name.split(".")[0] in kinds]
            awake = [name for name in names if left[name] and name not in useless]
            for name in set(names) - set(awake):
                self._launcher.kill(name)
            unstopped |= set(names) - useless - self._launcher.stop(awake, deadline_s)
            statuses |= self._launcher.statuses(awake, LAST_STATUS_DEADLINE_S)
            for name in awake:
                self._launcher.kill(name)
        return unstopped, statuses

    def _refuse_if_ending(self) -> None:
        if self.ending is not None:
            raise ConfigError("the run is being ended; it takes no more commands")

    # --- the machine ----------------------------------------------------------------------

    def _apply(self, *events: Event) -> list[Effect]:
        """Hand events of one moment to the machine, save what it decides, and perform that.

        So once more with the failures among the actions. Returns all actions.
        """
        done: list[Effect] = []
        while events:
            effects = self._decide(events)
            self.report.tell_losses(self._machine)
            if effects:
                self._save()
            gone = [self._actuator.carry_out(effect, self._num_restarts(effect)) for effect in effects]
            events = tuple(found for found in gone if found is not None)
            done += effects
        return done

    def _decide(self, events: Iterable[Event]) -> list[Effect]:
        """Return the machine's actions.

        What was seen of a service that an action for another one replaces is of its last incarnation.
        """
        effects: list[Effect] = []
        renewed: set[str] = set()
        for event in events:
            if getattr(event, "name", None) not in renewed:
                found = self._machine.apply(event, self._runtime.now())
                renewed |= _renewed_by(found)
                effects += found
        return effects

    def _num_restarts(self, effect: Effect) -> int:
        unit = self._machine.units.get(key_of(effect.name)) if isinstance(effect, Start) else None
        return unit.num_restarts if unit else 0

    def _repeat_promotions(self, statuses: Statuses) -> None:
        """Resend Promote to replicas that should lease and still report standby."""
        idle = {name for name, told in statuses.told_replicas.items() if told.standby}
        for unit in self._machine.replicas if idle else ():
            if f"rollout.{unit.index}" in idle:
                self._actuator.tell_replica(unit.index, service_command.Promote())

    def _take_over(self, found: SavedFleet) -> None:
        self._machine = restore(self._rules, found.machine, self._runtime.now())
        self._max_lag, self.ending = found.bound.max_lag, found.ending
        living, known = self._launcher.adopt(), set(self._machine.names)
        self.report.begin(self._machine)
        log.info("taking over %d services of %d", len(living & known), len(known))
        self._events.add("start", "supervisor.0", f"the supervisor takes over {len(living & known)} services")
        for name in sorted(living - known):  # to be ended, or to be started again, when the last one died
            self._actuator.kill(name)
        # No service is started before the statuses have shown the nodes of the others.
        self._launcher.statuses(sorted(living & known), STATUS_DEADLINE_S)
        dead = known - living if self.ending is None else ()
        self._apply(*in_order(Gone(name, "gone: it died while no supervisor ran") for name in sorted(dead)))

    def _save(self) -> None:
        state = SavedFleet(
            run_id=self._roster.run_id,
            bound=SavedBound(self._max_lag),
            ending=self.ending,
            machine=dump(self._machine),
        )
        self.file.write(state)

    def _tell_bound(self) -> None:
        """Tell a buffer the bound that was tightened, until it has taken it."""
        if not self._machine.units["buffer"].is_up:
            self._is_bound_told = False
        elif self._max_lag is not None and not self._is_bound_told:
            self._is_bound_told = self._actuator.tighten(self._max_lag)

    def _describe_begun(self, effects: list[Effect]) -> Begun:
        started = [one.name for one in effects if isinstance(one, Start) and one.name.startswith("rollout.")]
        promoted = [f"rollout.{one.index}" for one in effects if isinstance(one, Promote)]
        drained = [f"rollout.{one.index}" for one in effects if isinstance(one, Drain)]
        ended = [one.name for one in effects if isinstance(one, Kill) and one.name.startswith("rollout.")]
        return Begun(self._machine.wanted, (*promoted, *started), (*drained, *ended))


def _renewed_by(effects: Iterable[Effect]) -> set[str]:
    """Return the services that actions replace or end."""
    return {effect.name for effect in effects if isinstance(effect, Start | Kill | End)}


def _without_ages(state: SavedFleet) -> SavedFleet:
    """Return the part of the saved state whose change requires a new write: times are left out."""
    units = tuple(map(_settle, state.machine.units))
    return msgspec.structs.replace(state, machine=msgspec.structs.replace(state.machine, units=units))


def _settle(unit: SavedUnit) -> SavedUnit:
    """Return a unit with times reduced to their presence, and its next start rounded."""
    due_in_s = None if unit.due_in_s is None else unit.due_in_s // SAVED_EVERY_S  # not waited for all anew
    return msgspec.structs.replace(
        unit,
        restart_ages_s=(0.0,) * len(unit.restart_ages_s),
        leaving_for_s=None if unit.leaving_for_s is None else 0.0,
        due_in_s=due_in_s,
    )
