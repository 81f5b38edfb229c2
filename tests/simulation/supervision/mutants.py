"""Mutants of the supervisor, of its upkeep and of the fleet machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from asyncrl.control import operations
from asyncrl.control.fleet import machine
from asyncrl.control.fleet.budget import Budget
from asyncrl.control.fleet.machine import FleetMachine
from asyncrl.control.fleet.units import Member, Unit
from asyncrl.control.operations import Operations
from asyncrl.control.reconciler import reconciler as keeper
from asyncrl.control.reconciler import status_events as reading
from asyncrl.control.reconciler.actuator import ServiceActuator
from asyncrl.control.reconciler.reconciler import FleetFile, FleetReconciler, SavedFleet
from asyncrl.control.reconciler.report import FleetReport
from asyncrl.control.record.events import EventLog
from asyncrl.control.rows.collector import RowCollector
from asyncrl.control.supervisor import Supervisor
from asyncrl.core.service_command import Promote
from asyncrl.core.status.statuses import Statuses
from tests.simulation.mutation import Mutant, Patch, always


def _forget_restart(self: FleetMachine, unit: Unit, delay_s: float) -> None:
    unit.num_restarts += 1


def _let_lie(self: FleetMachine, member: Member) -> None:
    member.is_down = True


def _tell_no_promotion(self: ServiceActuator, index: int, command: Any) -> Any:
    return None if isinstance(command, Promote) else _TELL(self, index, command)


def _tell_nobody(self: FleetReport, fleet: FleetMachine) -> None:
    fleet.losses = []


def _finish_for_now(self: FleetReconciler) -> None:
    """Nothing is taken down."""


def _forget_ending(self: FleetReconciler, found: SavedFleet) -> None:
    _TAKE_OVER(self, msgspec.structs.replace(found, ending=None))


def _see_no_stop(run_id: str, found: Statuses, find_stopped: Callable[[str], set[str]]) -> Any:
    return reading.events_of(run_id, found, always(set()))


def _remove_at_once(self: FleetMachine, index: int) -> None:
    unit = self.units.get(machine.replica_key(index))
    if unit is not None:
        self._remove(unit)


def _write_once(self: EventLog) -> None:
    try:
        _WRITE(self)
    finally:
        self._unwritten = []


def _start_anew(self: FleetReconciler, replicas: int, standby: int) -> bool:
    self.file.path.unlink(missing_ok=True)
    return _BEGIN(self, replicas, standby)


_TELL, _TAKE_OVER, _BEGIN, _WRITE = (
    ServiceActuator.tell_replica,
    FleetReconciler._take_over,
    FleetReconciler.begin,
    EventLog._write,
)


def _mutant(name: str, guard: str, faults: str, *patches: tuple[Any, str, Any]) -> Mutant:
    return Mutant(name, guard, faults, tuple(Patch(*one) for one in patches))


MUTANTS = (
    _mutant(
        "restarts",
        "what dies is started again",
        "deaths",
        (FleetMachine, "_plan_restart", _forget_restart),
    ),
    _mutant(
        "kill_first",
        "a service is killed before it is started again",
        "silence",
        (FleetMachine, "_kill_member", _let_lie),
    ),
    _mutant(
        "takes_over",
        "a successor takes charge of what runs",
        "successor",
        (FleetReconciler, "begin", _start_anew),
    ),
    _mutant(
        "fleet_saved",
        "what the machine has come to is on disk before it is done",
        "successor",
        (FleetFile, "write", always(None)),
    ),
    _mutant(
        "stop_taken_down",
        "a successor knows of the stop that was asked for",
        "stopped",
        (FleetReconciler, "finish_learner", _finish_for_now),
    ),
    _mutant(
        "ending_saved",
        "a successor of one that was ending the run only ends it",
        "stopped",
        (FleetReconciler, "_take_over", _forget_ending),
    ),
    _mutant(
        "losses_told",
        "each death is among the events",
        "deaths",
        (FleetReport, "tell_losses", _tell_nobody),
    ),
    _mutant(
        "events_kept",
        "an event that a full disk did not take is written later",
        "full_disk",
        (EventLog, "_write", _write_once),
    ),
    _mutant(
        "promise_kept",
        "a requested checkpoint is requested again until it exists",
        "checkpoints",
        (Operations, "renew_pending_checkpoint", always(None)),
    ),
    _mutant(
        "pause_marked",
        "a service that is started again in a paused run is paused",
        "paused",
        (operations, "write_paused", always(None)),
    ),
    _mutant(
        "leases_retired",
        "what a dead replica held is issued again at once",
        "standby",
        (ServiceActuator, "_deregister", always(None)),
    ),
    _mutant(
        "silence",
        "who gives no sign of life is started again",
        "silence",
        (FleetMachine, "_why_overdue", always(None)),
    ),
    _mutant(
        "halted",
        "a process that somebody has stopped is not waited for as long as a busy one",
        "silence",
        (keeper, "events_of", _see_no_stop),
    ),
    _mutant(
        "start_deadline",
        "a service that does not get on with its start is started again",
        "stuck_start",
        (machine, "STARTING_STATES", frozenset()),
    ),
    _mutant(
        "promotion_told",
        "who takes the place of a dead replica is told to lease",
        "standby",
        (ServiceActuator, "tell_replica", _tell_no_promotion),
    ),
    _mutant(
        "scaled_down",
        "replicas that are not wanted leave",
        "scaled",
        (FleetMachine, "_let_go", always(None)),
    ),
    _mutant(
        "drained",
        "a replica that works drains before it is ended",
        "scaled",
        (FleetMachine, "_let_go", _remove_at_once),
    ),
    _mutant(
        "saved_at_stop",
        "a learner that has trained is waited for at a stop",
        "stopped",
        (Supervisor, "_has_trained", always(False)),
    ),
    _mutant(
        "budget",
        "a service may be started again several times",
        "deaths",
        (Budget, "ask", always(None)),
    ),
    _mutant(
        "given_up",
        "a run that cannot be kept up ends",
        "crash_loop",
        (FleetReconciler, "given_up", property(always(None))),
    ),
    _mutant(
        "rows_recovered",
        "rows that a dead learner handed over to nobody are on record",
        "checkpoints",
        (RowCollector, "_recover", always(False)),
    ),
)
