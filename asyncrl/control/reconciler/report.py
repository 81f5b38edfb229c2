"""Report on the fleet: stages, failures and facts of services, for the snapshot and the log of events.

Owns what was reported last, so that each loss and each return is an event once. Decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from asyncrl.control.fleet.machine import FleetMachine
from asyncrl.control.fleet.units import Stage, Unit, key_of
from asyncrl.control.record.events import EventLog
from asyncrl.control.snapshot import ServiceFacts
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ServiceStatus
from asyncrl.core.status.statuses import Statuses

log = logging.getLogger(__name__)


class FleetReport:
    """See the module. `facts` may be asked by any thread, the others by one at a time."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._stages: dict[str, Stage] = {}
        self._facts: dict[str, ServiceFacts] = {}
        self._failures: dict[str, str] = {}  # why a service failed last, until its unit is up again

    def facts(self, name: str) -> ServiceFacts:
        """Return the facts of the last pulse about a service beyond its own status."""
        return self._facts.get(name, ServiceFacts())

    def begin(self, machine: FleetMachine) -> None:
        """Begin with the stages of `machine`, of which a supervisor before has reported."""
        self._stages = machine.stages()

    def tell_losses(self, machine: FleetMachine) -> None:
        """Report the services that `machine` has found to be gone since the last call."""
        losses, machine.losses = machine.losses, []
        for loss in losses:
            log.warning("%s %s", loss.name, loss.reason)
            self._failures[loss.name] = loss.reason.removeprefix("failed: ")
            self._events.add("exit", loss.name, f"{loss.name} {loss.reason}")

    def tell_stages(self, machine: FleetMachine) -> None:
        """Report the units that have become ready since the last call."""
        before, self._stages = self._stages, machine.stages()
        for key, stage in self._stages.items():
            if stage is not Stage.READY or before.get(key) in (Stage.READY, Stage.SUSPECT, None):
                continue
            self._tell_ready(key, machine.units[key], machine.lived)

    def renew_facts(self, machine: FleetMachine) -> None:
        """Take the facts about every service from `machine`."""
        names = [name for unit in machine.units.values() for name in unit.members]
        self._facts = {name: self._describe(name, machine) for name in names}

    def complete(self, found: Mapping[str, ServiceStatus], machine: FleetMachine) -> Statuses:
        """Return the statuses with those that are between two incarnations, without those that have left."""
        units = machine.units.values()
        dead = {
            member.name: _describe_down(unit, machine)
            for unit in units
            for member in unit.members.values()
            if member.is_down
        }
        living = set(machine.names)
        starting = ServiceStatus(state=ServiceState.STARTING)
        told = {name: status for name, status in found.items() if name in living}
        told |= {**dict.fromkeys(living - set(found), starting), **dead}
        up = {name for unit in units if unit.is_up for name in unit.members}
        self._failures = {
            name: why for name, why in self._failures.items() if name in told and name not in up
        }
        again = {name: why for name, why in self._failures.items() if name not in dead}
        failed = {name: msgspec.structs.replace(told[name], failure=why) for name, why in again.items()}
        return Statuses(told | failed)

    def _tell_ready(self, key: str, unit: Unit, lived: float) -> None:
        if unit.failed_at is None:
            self._events.add("ready", key, f"{key} is ready")
            return
        took_s = round(lived - unit.failed_at, 1)
        self._events.add("ready", key, f"{key} is ready again, {took_s:g} s after it failed", took_s=took_s)

    def _describe(self, name: str, machine: FleetMachine) -> ServiceFacts:
        silence_s, unit = machine.silence_of(name), machine.units[key_of(name)]
        is_down = unit.members[name].is_down
        back_in_s = unit.due - machine.lived if is_down and unit.due is not None else None
        return ServiceFacts(
            heartbeat_age_s=None if silence_s is None else round(silence_s, 1),
            restarts=unit.num_restarts,
            stage=self._stages.get(unit.key),
            standby=unit.is_standby,
            reason=unit.last_reason if is_down else "",
            back_in_s=None if back_in_s is None else round(max(0.0, back_in_s), 1),
        )


def _describe_down(unit: Unit, machine: FleetMachine) -> ServiceStatus:
    """Return the status of a service without a process; its retirement is an obstacle, `failure`."""
    if not unit.is_retired:
        return ServiceStatus(state=ServiceState.DEAD, error=unit.last_reason)
    back_in_s = max(0.0, (unit.due or 0.0) - machine.lived)
    why = f"{unit.last_reason}; retired, with no restarts left; started again in "
    why += f"{back_in_s:.0f} s, or by 'asyncrl scale rollout={machine.wanted}'"
    return ServiceStatus(state=ServiceState.RETIRED, error=unit.last_reason, failure=why)
