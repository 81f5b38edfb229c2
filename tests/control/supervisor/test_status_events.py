"""Meaning of a service's status for the fleet, and the fleet's state on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncrl.control.fleet.messages import Cause, Gone
from asyncrl.control.reconciler.reconciler import FleetFile
from asyncrl.control.reconciler.status_events import event_of, events_of
from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.core.errors import ConfigError
from tests.control.supervisor.test_repair import STOPPED, Run
from tests.statuses import status_of, statuses_of


def test_what_cannot_be_cured_is_told_first_and_a_receiver_after_its_engine() -> None:
    gone = {"state": "DEAD", "error": "it was killed"}
    statuses = {
        "publisher.0": {"state": "READY"},
        "receiver.1": gone,
        "rollout.1": {"state": "FAILED", "error": "ServiceFailed: no receiver"},
        "buffer.0": gone,
        "learner.0": {"state": "FAILED", "error": "UnstableTraining: nan"},
    }
    order = [getattr(event, "name", "") for event in events_of("x", statuses_of(statuses))]
    assert order == ["learner.0", "buffer.0", "rollout.1", "receiver.1", "publisher.0"]


def test_an_error_of_the_configuration_is_never_tried_again() -> None:
    kinds = ["ConfigError", "ServiceFailed"]
    failed = status_of("rollout.0", state="FAILED", error="ServiceFailed: x", error_kinds=kinds)
    assert event_of("rollout.0", failed) == Gone("rollout.0", "failed: ServiceFailed: x", Cause.FINAL)
    failed = replace(failed, error_kinds=("ServiceFailed",))
    assert event_of("rollout.0", failed) == Gone("rollout.0", "failed: ServiceFailed: x", Cause.ERROR)


def test_a_supervisor_refuses_the_fleet_of_a_newer_release_by_its_format(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.begin()
    saved = read_json(RunDir(tmp_path).fleet)
    assert saved is not None
    saved["machine"] = {"format": saved["machine"]["format"] + 1, "units_by_host": {}}
    RunDir(tmp_path).fleet.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"of this run's fleet has format 2, and this release .* knows 1"):
        Run(tmp_path, first.launcher).upkeep.begin(3, 0)
    first.upkeep.stop(5.0, STOPPED)


def test_the_fleet_is_written_anew_when_more_than_ages_has_changed_and_a_full_disk_is_tried_again(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.begin()
    run.launcher.gone.add("publisher.0")
    run.pulse()
    run.upkeep.stop(5.0, STOPPED)
    file = FleetFile(tmp_path)
    assert file.read("another run") is None
    saved = file.read(run.roster.run_id)
    assert saved is not None and saved.ending == STOPPED
    (aged,) = [unit for unit in saved.machine.units if unit.restart_ages_s]
    file.write(saved)
    file.path.unlink()
    older = replace(aged, restart_ages_s=(aged.restart_ages_s[0] + 60.0,))
    units = tuple(older if unit is aged else unit for unit in saved.machine.units)
    file.write(replace(saved, machine=replace(saved.machine, units=units)))
    assert not file.path.exists(), "it has the same restarts"
    file.path.mkdir()
    file.write(replace(saved, ending=None))
    assert file.write_error
    file.path.rmdir()
    file.write(replace(saved, ending=None))
    assert not file.write_error and file.read(run.roster.run_id) == replace(saved, ending=None)
