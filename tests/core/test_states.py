"""One spelling of each state, wherever it is sent, compared or shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.control.fleet.units import Stage
from asyncrl.core.states import ServiceState
from rollout_service.replica.states import State
from weight_sync.protocol.members import MemberState

ROOT = Path(__file__).parents[2]
PACKAGES = ("asyncrl", "learner", "rollout_service", "weight_sync")
OLD_SPELLING = re.compile(
    r"""\bstate\b.{0,40}?["'](?:ready|RUNNING|training|finishing|serving|gone|ended)["']"""
)


@pytest.mark.parametrize("states", [Stage, State, MemberState])
def test_every_state_of_a_part_is_spelled_as_in_the_one_enum(
    states: type[Stage | State | MemberState],
) -> None:
    names = {str(state) for state in states} - {"DONE"}  # a fleet's unit that ended by itself; never shown
    assert names <= {str(state) for state in ServiceState}
    assert all(state.name == state.value for state in ServiceState)


def test_no_source_compares_or_sends_a_state_in_another_spelling() -> None:
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OLD_SPELLING.search(line)
    ]
    assert sources and lines == []
