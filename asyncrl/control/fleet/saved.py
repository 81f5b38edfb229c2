"""Saved state of the fleet for the next supervisor, as plain values (pure).

Times are saved as ages: the clock of the next process may be another. Fields that later releases have added
have defaults, so that the saved state of an older release can be read.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from asyncrl.control.fleet.budget import Budget
from asyncrl.control.fleet.machine import FleetMachine, FleetRules
from asyncrl.control.fleet.units import Member, Unit
from asyncrl.core.errors import ConfigError
from asyncrl.core.states import ServiceState

FORMAT = 1


class SavedMember(msgspec.Struct, frozen=True):
    """A service of a unit."""

    name: str
    is_down: bool
    came_up: bool
    state: ServiceState


class SavedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit: ages and waits in lived seconds from when it was saved."""

    key: str
    members: tuple[SavedMember, ...]
    restart_ages_s: tuple[float, ...]
    was_up: bool
    num_spent: int = 0
    is_retired: bool = False
    due_in_s: float | None
    is_standby: bool
    leaving_for_s: float | None
    has_been_up: bool
    last_reason: str
    num_restarts: int
    is_ending: bool
    failed_step: int
    num_alike: int


class SavedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet machine, without values that change with every pulse, such as heartbeats."""

    format: int
    wanted: int
    wanted_standby: int
    is_short: bool
    units: tuple[SavedUnit, ...]


def dump(machine: FleetMachine) -> SavedMachine:
    """Return the state of `machine`."""
    return SavedMachine(
        format=FORMAT,
        wanted=machine.wanted,
        wanted_standby=machine.wanted_standby,
        is_short=machine.is_short,
        units=tuple(_dump_unit(unit, machine.lived) for unit in machine.units.values()),
    )


def refuse_newer(saved: object) -> None:
    """Refuse the plain values of a machine that a newer release has saved: its fields may be others.

    Raises:
        ConfigError: It is one.
    """
    found = saved.get("format") if isinstance(saved, Mapping) else None
    if isinstance(found, int) and found > FORMAT:
        raise ConfigError(
            f"the state of this run's fleet has format {found}, and this release of asyncrl knows {FORMAT}",
            hint="Go on with the release that has run it last, or choose another run.name",
        )


def restore(rules: FleetRules, saved: SavedMachine, now: float) -> FleetMachine:
    """Return a machine in the state `saved`. Services that are gone by now are to be reported so."""
    machine = FleetMachine(rules, now)
    machine.wanted, machine.wanted_standby = saved.wanted, saved.wanted_standby
    machine.is_short = saved.is_short
    machine.units |= {found.key: _restore_unit(found, rules) for found in saved.units}
    return machine


def _dump_unit(unit: Unit, now: float) -> SavedUnit:
    return SavedUnit(
        key=unit.key,
        members=tuple(
            SavedMember(one.name, one.is_down, one.came_up, one.state) for one in unit.members.values()
        ),
        restart_ages_s=tuple(now - then for then in unit.budget.times),
        was_up=unit.budget.was_up,
        num_spent=unit.budget.num_spent,
        is_retired=unit.is_retired,
        due_in_s=None if unit.due is None else unit.due - now,
        is_standby=unit.is_standby,
        leaving_for_s=None if unit.leaving_since is None else now - unit.leaving_since,
        has_been_up=unit.has_been_up,
        last_reason=unit.last_reason,
        num_restarts=unit.num_restarts,
        is_ending=unit.is_ending,
        failed_step=unit.failed_step,
        num_alike=unit.num_alike,
    )


def _restore_unit(found: SavedUnit, rules: FleetRules) -> Unit:
    """Return the unit at lived time 0; a service with a process counts as just heard."""
    times = [-age_s for age_s in found.restart_ages_s]
    return Unit(
        key=found.key,
        members={one.name: Member(**msgspec.structs.asdict(one)) for one in found.members},
        budget=Budget(rules.max_restarts, times, was_up=found.was_up, num_spent=found.num_spent),
        is_retired=found.is_retired,
        due=found.due_in_s,
        is_standby=found.is_standby,
        leaving_since=None if found.leaving_for_s is None else -found.leaving_for_s,
        has_been_up=found.has_been_up,
        last_reason=found.last_reason,
        num_restarts=found.num_restarts,
        is_ending=found.is_ending,
        step=found.failed_step,  # or further: the learner says so in its next status
        failed_step=found.failed_step,
        num_alike=found.num_alike,
    )
