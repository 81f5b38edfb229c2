"""A stop waits only for services that have something to hand over. Services are scripted, in threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from thread_launcher import ThreadLauncher

from asyncrl.control.api import operations as api
from tests.control.supervisor.test_repair import REPLACE, make_supervised, read_outcome, supervise_again
from tests.control.supervisor.test_supervisor import make_supervisor, start
from tests.statuses import told_by
from tests.waiting import tell, wait_for


def test_a_learner_that_has_trained_nothing_is_not_waited_for(tmp_path: Path) -> None:
    supervisor, launcher = make_supervised(tmp_path, "NothingToSave")
    thread = threading.Thread(target=supervisor.run, args=(threading.Event(),))
    thread.start()
    wait_for(lambda: supervisor.lifecycle.state == "running")
    supervisor.operations.perform(api.Stop())
    try:
        wait_for(lambda: supervisor.lifecycle.state == "stopped")
        assert "learner.0" in launcher.killed
    finally:
        (tmp_path / "may-save").touch()  # lets the thread that stands for its process end
        thread.join(120.0)


def test_a_step_that_was_done_since_the_last_look_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.control.supervisor.PULSE_S", 1.0)
    supervisor, launcher = make_supervised(tmp_path, "NothingToSave")
    thread = threading.Thread(target=supervisor.run, args=(threading.Event(),))
    thread.start()
    wait_for(lambda: supervisor.lifecycle.state == "running")
    launcher.service("learner.0").step = 1
    supervisor.operations.perform(api.Stop())
    tell(tmp_path / "may-save", "there is no room")
    thread.join(120.0)
    assert "there is no room" in read_outcome(tmp_path)["error"], "it was waited for"


def test_a_learner_whose_process_dies_after_its_end_holds_up_nothing(tmp_path: Path) -> None:
    replace = {**REPLACE, "buffer": "scripted_services:LateEvaluation"}
    supervisor, launcher = make_supervisor(tmp_path, replace=replace)
    thread, stop = start(supervisor)
    wait_for(lambda: told_by(supervisor)["services"].get("learner.0", {}).get("state") == "ENDED")
    launcher.gone.add("learner.0")
    thread.join(120.0)
    stop.set()
    assert not thread.is_alive() and supervisor.lifecycle.state == "finished"
    assert told_by(supervisor)["accuracy"] == 0.25, "its last evaluation was waited for"


def test_what_keeps_the_last_checkpoint_from_being_written_is_told(tmp_path: Path) -> None:
    buffer, learner = "scripted_services:AwayBuffer", "scripted_services:SlowSaver"
    (tmp_path / "journal-back").touch()
    launcher = ThreadLauncher({**REPLACE, "buffer": buffer, "learner": learner})
    supervisor = supervise_again(tmp_path, launcher)
    thread = threading.Thread(target=supervisor.run, args=(threading.Event(),))
    thread.start()
    wait_for(lambda: supervisor.lifecycle.state == "running")
    supervisor.operations.perform(api.Stop())
    wait_for(lambda: supervisor.lifecycle.state == "stopping")
    (tmp_path / "journal-back").unlink()
    try:
        wait_for(lambda: bool(told_by(supervisor)["obstacles"]))
    finally:
        tell(tmp_path / "may-save", "the buffer does not answer")
        thread.join(120.0)
    error = read_outcome(tmp_path)["error"]
    assert "the buffer does not answer (Redis at localhost:1 is away: Connection refused); it wrote" in error
