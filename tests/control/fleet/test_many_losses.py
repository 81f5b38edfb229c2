"""A run with many replicas: all that one pulse decides is saved at once, then done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.control.record.rundir import read_json
from asyncrl.control.roster import ServiceSpec
from tests.control.supervisor.test_repair import STOPPED, Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.upkeep.stop(5.0, STOPPED)


def test_all_that_a_pulse_decides_is_on_disk_before_the_first_of_it_is_done(run: Run) -> None:
    run.begin(replicas=8)
    saved: list[dict[str, int]] = []
    start, write = run.launcher.start, run.upkeep.file.write
    num_writes = 0

    def start_and_look(spec: ServiceSpec) -> None:
        units = (read_json(run.upkeep.file.path) or {})["machine"]["units"]
        saved.append({unit["key"]: unit["num_restarts"] for unit in units})
        start(spec)

    def count(state: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        write(state)

    run.launcher.start = start_and_look  # type: ignore[method-assign]
    run.upkeep.file.write = count  # type: ignore[method-assign]
    run.launcher.gone |= {f"rollout.{index}" for index in range(8)}
    run.pulse()
    assert len(saved) == 16, "eight engines and their receivers"
    assert all(restarts[f"replica.{index}"] == 1 for restarts in saved for index in range(8))
    assert num_writes == 2, "once before, and at the end of the pulse"


@pytest.mark.long
def test_a_fleet_grows_by_hundreds_of_replicas_in_one_go(run: Run) -> None:
    run.begin()
    run.launcher.started.clear()
    begun = run.upkeep.scale(300)
    assert len(begun.started) == 298
    assert sum(name.startswith("receiver.") for name in run.launcher.started) == len(begun.started)
