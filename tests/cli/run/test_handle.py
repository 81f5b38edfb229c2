"""A live run in the hands of a terminal. The head is a stand-in process with the run's mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.run.handle import FIRST_START, RunHandle, attach
from asyncrl.control.api.server import ControlApi
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.roster import RUN_VARIABLE
from asyncrl.control.snapshot import Snapshot, values_of

RUN_ID = f"held{os.getpid()}"
SLEEP = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"

StartHead = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def start_head(folder: RunDir) -> Iterator[StartHead]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str = SLEEP, url: str = "") -> subprocess.Popen[bytes]:
        environment = {**os.environ, RUN_VARIABLE: RUN_ID}
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        started.append(process)
        sockets = str(folder.path / "sockets")
        live = {"run_id": RUN_ID, "key": "k", "sockets": sockets, "pid": process.pid, "url": url}
        write_json(folder.live, live)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(60.0)
        assert process.stdout is not None
        process.stdout.close()


def found(folder: RunDir) -> RunHandle:
    handle = attach(folder)
    assert handle is not None
    return handle


def test_a_run_is_found_live_before_it_has_an_api_and_not_when_its_head_is_dead(
    folder: RunDir, start_head: StartHead
) -> None:
    assert attach(folder) is None
    head = start_head()
    handle = found(folder)
    assert not handle.is_over
    assert values_of(handle.poll()) == {
        "run": folder.path.name,
        "state": "starting",
        "phase": "starting the head process",
    }
    head.kill()
    head.wait(60.0)
    assert handle.is_over
    assert attach(folder) is None


def test_while_no_supervisor_answers_the_head_says_what_it_is_busy_with(
    folder: RunDir, start_head: StartHead
) -> None:
    start_head(url="http://127.0.0.1:9")
    write_json(folder.phase, {"state": "stopping", "phase": "ending Ray", "time": 0.0})
    assert found(folder).poll().phase == "ending Ray"


def test_a_supervisor_that_has_answered_and_does_not_any_more_is_not_said_to_start(
    folder: RunDir, start_head: StartHead
) -> None:
    start_head(url="http://127.0.0.1:9")
    write_json(folder.phase, {"state": "starting", "phase": FIRST_START, "time": 0.0})
    assert found(folder).poll().phase == "the supervisor does not answer"
    write_json(folder.phase, {"state": "starting", "phase": f"{FIRST_START} again", "time": 0.0})
    assert found(folder).poll().phase == "starting the supervisor again"


def test_a_run_without_services_is_stopped_by_its_head(folder: RunDir, start_head: StartHead) -> None:
    head = start_head()
    found(folder).stop(10.0)
    assert head.wait(60.0) == -signal.SIGTERM


def test_a_run_with_an_api_is_asked_and_everything_that_it_shows_meanwhile_is_passed_on(
    folder: RunDir, start_head: StartHead
) -> None:
    asked: list[float] = []

    def stop(_: dict[str, Any]) -> dict[str, Any]:
        asked.append(time.monotonic())
        head.kill()
        return {}

    routes = {"GET /status": lambda _: {"state": "stopping", "phase": "writing"}, "POST /stop": stop}
    api = ControlApi(0, "k", routes)
    head = start_head(url=api.url)
    shown: list[Snapshot] = []
    found(folder).stop(10.0, shown.append)
    api.close()
    assert len(asked) == 1 and shown


def test_a_run_that_runs_on_after_it_was_asked_to_end_is_asked_again(
    folder: RunDir, start_head: StartHead
) -> None:
    asked: list[int] = []

    def stop(_: dict[str, Any]) -> dict[str, Any]:
        asked.append(1)
        if len(asked) == 2:
            head.kill()
        return {}

    api = ControlApi(0, "k", {"GET /status": lambda _: {"state": "running"}, "POST /stop": stop})
    head = start_head(url=api.url)
    assert found(folder).await_end(10.0, lambda snapshot: None)
    api.close()
    assert len(asked) == 2


def test_a_run_whose_supervisor_is_being_started_again_is_asked_until_somebody_hears(
    folder: RunDir, start_head: StartHead
) -> None:
    head = start_head(url="http://127.0.0.1:9")
    handle = found(folder)
    assert not handle.ask_stop()
    api = ControlApi(0, "k", {"POST /stop": lambda _: head.kill() or {}})
    live = {"run_id": RUN_ID, "key": "k", "sockets": "s", "pid": head.pid, "url": api.url}
    write_json(folder.live, live)
    assert handle.ask_stop()
    api.close()


def test_what_does_not_end_in_time_is_killed_and_reaped_and_its_sockets_are_removed(
    folder: RunDir, start_head: StartHead
) -> None:
    head = start_head(DEAF)
    assert head.stdout is not None
    head.stdout.readline()
    (folder.path / "sockets").mkdir()
    handle = found(folder)
    handle.head = head  # as in the terminal that started it, which reaps it too
    handle.stop(0.5)
    assert head.wait(60.0) == -signal.SIGKILL
    assert not (folder.path / "sockets").exists()


def test_a_run_whose_head_died_without_a_word_is_failed(folder: RunDir, start_head: StartHead) -> None:
    start_head()
    folder.logs.mkdir()
    folder.log("head.0").write_text("last words\n")
    result = found(folder).result()
    assert (result.state, result.service, result.tail) == ("failed", "head.0", ("last words",))


def test_how_a_head_was_killed_that_the_terminal_had_started_is_told(
    folder: RunDir, start_head: StartHead
) -> None:
    head = start_head()
    handle = found(folder)
    handle.head = head
    head.kill()
    head.wait(60.0)
    assert handle.result().error == "the head process died of SIGKILL"
