"""A stop waits only for services that have something to hand over. Services are scripted, in threads."""

from __future__ import annotations

import threading
from pathlib import Path

from test_repair import make_supervised
from test_supervisor import wait_for


def test_a_learner_that_has_trained_nothing_is_not_waited_for(tmp_path: Path) -> None:
    supervisor, launcher = make_supervised(tmp_path, "NothingToSave")
    thread = threading.Thread(target=supervisor.run, args=(threading.Event(),))
    thread.start()
    wait_for(lambda: supervisor.state == "running")
    supervisor.command("stop", {})
    try:
        wait_for(lambda: supervisor.state == "stopped")
        assert "learner.0" in launcher.killed
    finally:
        (tmp_path / "may-save").touch()  # lets the thread that stands for its process end
        thread.join(30.0)
