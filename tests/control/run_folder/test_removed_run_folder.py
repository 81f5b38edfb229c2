"""A run whose folder somebody removes ends at once, says that, and how it ended is recorded all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_services import REPLACE

from asyncrl.cli.run.ending import paragraph
from asyncrl.cli.run.handle import RunHandle
from asyncrl.control.record.rundir import RunDir, read_json
from tests.control.supervisor.test_supervisor import make_supervisor, start
from tests.statuses import told_by
from tests.waiting import wait_for


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_run_whose_folder_is_removed_ends_with_that(tmp_path: Path, is_made_anew: bool) -> None:
    folder = RunDir(tmp_path / "run")
    folder.path.mkdir()
    replace = {**REPLACE, "learner": "scripted_services:WaitingLearner"}
    supervisor, launcher = make_supervisor(folder.path, steps=10**6, replace=replace)
    thread, stop = start(supervisor)
    wait_for(lambda: told_by(supervisor)["state"] == "running")
    folder.path.rename(tmp_path / "away")  # at once, as no rmtree is
    if is_made_anew:
        folder.logs.mkdir(parents=True)  # as a service does that is started again
    thread.join(120.0)
    has_ended = not thread.is_alive()
    stop.set()
    thread.join(120.0)
    assert has_ended and "learner.0" in launcher.killed
    outcome = read_json(folder.outcome)
    assert outcome is not None and outcome["state"] == "failed" and outcome["is_removed"]
    handle = RunHandle(folder, pid=1, run_id="x", sockets=tmp_path, command="asyncrl up a.yaml")
    assert paragraph(folder, handle.result()) == (
        f"the run failed: the run's folder {folder.path} was removed. "
        "What it had saved is gone with it. To begin anew: asyncrl up a.yaml"
    )


def test_a_run_that_left_no_word_with_its_folder_is_told_of_as_such(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "gone")
    handle = RunHandle(folder, pid=1, run_id="x", sockets=tmp_path, command="asyncrl up a.yaml")
    told = paragraph(folder, handle.result())
    assert told.startswith(f"the run failed: the run's folder {folder.path} was removed. ")
    assert told.endswith("To begin anew: asyncrl up a.yaml")
