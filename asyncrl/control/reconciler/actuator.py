"""Actuator: performs the fleet machine's actions on services, one by one.

Owns how a service is started and cleared away; decides nothing. Invariant: when `kill` returns, all that the
incarnation of a service left is dead and cleared away: its process, those that it had started, and its shared
memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Collection, Iterable

from asyncrl.control.fleet.messages import (
    Cause,
    Drain,
    Effect,
    End,
    Forgo,
    GiveUp,
    Gone,
    Kill,
    Promote,
    Retire,
    Start,
)
from asyncrl.control.machine.kernel import Kernel
from asyncrl.control.machine.processes import is_of_service
from asyncrl.control.ray.launcher import Launcher
from asyncrl.control.record.events import EventLog, Kind
from asyncrl.control.roster import Roster
from asyncrl.core import service_command
from asyncrl.core.errors import DeadlineExceeded, ServiceFailed
from asyncrl.core.service_command import A, Command, DeregisterReplica, DumpStacks, Tighten
from asyncrl.core.status.replica import ReplicaStatus
from asyncrl.core.status.service import BUFFER, ServiceStatus

log = logging.getLogger(__name__)

COMMAND_DEADLINE_S = 5.0
FAREWELL_DEADLINE_S = 10.0
SHORT_DEADLINE_S = 1.0


class ServiceActuator:
    """Starts, tells and ends the services of a run."""

    def __init__(self, roster: Roster, launcher: Launcher, events: EventLog, kernel: Kernel) -> None:
        self._roster = roster
        self._launcher = launcher
        self._events = events
        self._kernel = kernel
        self._pids: dict[str, int] = {}
        self._children: dict[str, Collection[int]] = {}

    def note_processes(self, name: str, status: ServiceStatus) -> None:
        """Remember the process of a service, and those that it has started: they die with it."""
        if status.pid is not None:
            self._pids[name] = status.pid
        if isinstance(status, ReplicaStatus):
            self._children[name] = status.child_pids

    def carry_out(self, effect: Effect, num_restarts: int) -> Gone | None:
        """Perform the action; return an event if a service turned out to be gone."""
        match effect:
            case Start():
                return self._start(effect, num_restarts)
            case Kill(name):
                self.kill(name)
            case End(name):
                self._launcher.stop([name], FAREWELL_DEADLINE_S)
                self.kill(name)
            case Drain(index):
                return self.tell_replica(index, service_command.Drain())
            case Promote(index):
                name = f"rollout.{index}"
                self._events.add("scale", name, f"{name} stood by, and leases from here on")
                return self.tell_replica(index, service_command.Promote())
            case Forgo(service, reason):
                log.error("%s", reason)
                self._events.add("scale", service, reason)
            case Retire(service, reason, back_in_s):
                log.error("%s", reason)
                self._events.add("retire", service, reason, back_in_s=back_in_s)
            case GiveUp(service, reason):
                log.error("giving up: %s", reason)
                self._events.add("exit", service, f"the run is given up: {reason}")
        return None

    def _start(self, effect: Start, num_restarts: int) -> Gone | None:
        kind: Kind = "restart" if num_restarts else "start"
        self._events.add(kind, effect.name, f"{effect.name} is started", restarts=num_restarts)
        try:
            self._launcher.start(self._roster.spec(effect.name, is_standby=effect.is_standby))
        except ServiceFailed as error:
            return Gone(effect.name, f"failed: {error}")
        return None

    def kill(self, name: str) -> None:
        """End a service, and everything that it has started, for good."""
        self._launcher.kill(name)
        self._pids.pop(name, None)
        living = self._kernel.end_service(self._roster.run_id, name, self._children.pop(name, ()))
        if living:
            log.error("%s: processes %s do not die", name, living)
        self._kernel.remove_segments(self._roster.run_id, name)
        if name.startswith("rollout."):
            self._deregister(name)

    def _deregister(self, name: str) -> None:
        """Have the buffer revoke a dead replica's leases. If that fails they expire."""
        try:
            self._launcher.command(BUFFER, DeregisterReplica(name), SHORT_DEADLINE_S)
        except (ServiceFailed, DeadlineExceeded) as error:
            log.warning("the leases of %s are left to run out: %s", name, error)

    def tell_replica(self, index: int, command: Command[A]) -> Gone | None:
        """Tell a replica; one that does not take it shows that in its status, or by its silence."""
        name = f"rollout.{index}"
        try:
            self._launcher.command(name, command, COMMAND_DEADLINE_S)
        except DeadlineExceeded as error:
            log.warning("%s", error)
        except ServiceFailed as error:
            return Gone(name, f"failed: {error}", Cause.DEATH)
        return None

    def tighten(self, max_lag: int) -> bool:
        """Tell the buffer under which bound it admits; return whether it took it."""
        try:
            self._launcher.command(BUFFER, Tighten(max_lag), COMMAND_DEADLINE_S)
        except (ServiceFailed, DeadlineExceeded) as error:
            log.warning("the buffer does not admit under the tightened bound yet: %s", error)
            return False
        return True

    def dump_stacks(self, names: Iterable[str]) -> None:
        """Have services write the stacks of all their threads into their logs."""
        for name in names:
            try:
                self._launcher.command(name, DumpStacks(), SHORT_DEADLINE_S)
            except (ServiceFailed, DeadlineExceeded):
                self._signal(name)

    def _signal(self, name: str) -> None:
        """Signal its process if it is here: on another machine the pid is another process."""
        pid = self._pids.get(name)
        if pid is None or not is_of_service(pid, self._roster.run_id, name):
            return
        with contextlib.suppress(ProcessLookupError):  # it died just now
            os.kill(pid, signal.SIGUSR1)
