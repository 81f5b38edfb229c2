"""Saved state of the fleet for the next supervisor, as plain values (pure).

Times are saved as ages: the clock of the next process may be another. Fields that later releases have added
have defaults, so that the saved state of an older release can be read.
"""

from __future__ import annotations

from typing import Any

from asyncrl.control.fleet.budget import Budget
from asyncrl.control.fleet.machine import FleetMachine, FleetRules
from asyncrl.control.fleet.units import Member, Unit

FORMAT = 1


def dump(machine: FleetMachine) -> dict[str, Any]:
    """Return the state of `machine`; what changes with every pulse, such as heartbeats, is left out."""
    return {
        "format": FORMAT,
        "wanted": machine.wanted,
        "wanted_standby": machine.wanted_standby,
        "is_short": machine.is_short,
        "units": [_dump_unit(unit, machine.lived) for unit in machine.units.values()],
    }


def restore(rules: FleetRules, saved: dict[str, Any], now: float) -> FleetMachine:
    """Return a machine in the state `saved`. Services that are gone by now are to be reported so.

    Raises:
        ValueError: It was written by a newer release.
    """
    if saved["format"] > FORMAT:
        raise ValueError(f"the fleet's state has format {saved['format']}, this release knows {FORMAT}")
    machine = FleetMachine(rules, now)
    machine.wanted, machine.wanted_standby = saved["wanted"], saved["wanted_standby"]
    machine.is_short = saved["is_short"]
    for found in saved["units"]:
        machine.units[found["key"]] = _restore_unit(found, rules)
    return machine


def _dump_unit(unit: Unit, now: float) -> dict[str, Any]:
    return {
        "key": unit.key,
        "members": [
            {"name": one.name, "is_down": one.is_down, "came_up": one.came_up, "state": one.state}
            for one in unit.members.values()
        ],
        "restart_ages_s": [now - then for then in unit.budget.times],
        "was_up": unit.budget.was_up,
        "num_spent": unit.budget.num_spent,
        "is_retired": unit.is_retired,
        "due_in_s": None if unit.due is None else unit.due - now,
        "is_standby": unit.is_standby,
        "leaving_for_s": None if unit.leaving_since is None else now - unit.leaving_since,
        "has_been_up": unit.has_been_up,
        "last_reason": unit.last_reason,
        "num_restarts": unit.num_restarts,
        "is_ending": unit.is_ending,
        "failed_step": unit.failed_step,
        "num_alike": unit.num_alike,
    }


def _restore_unit(found: dict[str, Any], rules: FleetRules) -> Unit:
    """Return the unit at lived time 0; who has a process counts as heard of just now."""
    times = [-age_s for age_s in found["restart_ages_s"]]
    leaving_s = found["leaving_for_s"]
    return Unit(
        key=found["key"],
        members={one["name"]: Member(**one) for one in found["members"]},
        budget=Budget(rules.max_restarts, times, was_up=found["was_up"], num_spent=found.get("num_spent", 0)),
        is_retired=found.get("is_retired", False),
        due=found["due_in_s"],
        is_standby=found["is_standby"],
        leaving_since=None if leaving_s is None else -leaving_s,
        has_been_up=found["has_been_up"],
        last_reason=found["last_reason"],
        num_restarts=found["num_restarts"],
        is_ending=found["is_ending"],
        step=found["failed_step"],  # or further: the learner says so in its next status
        failed_step=found["failed_step"],
        num_alike=found["num_alike"],
    )
