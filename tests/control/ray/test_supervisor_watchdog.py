"""The head keeps its supervisor alive, and notices when Ray's own processes die."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.control.fleet.budget import Budget
from asyncrl.control.ray.bootstrap import is_open
from asyncrl.control.ray.supervisor_watchdog import SILENCE_LIMIT_S, keep, watching_ray
from asyncrl.control.roster import RUN_VARIABLE, ServiceSpec
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.service import SERVICE_VARIABLE, ServiceContext
from asyncrl.core.states import RunState, ServiceState
from asyncrl.core.status.service import ServiceStatus, SupervisorStatus
from asyncrl.core.status.statuses import Statuses
from tests.runtimes import ManualClock
from tests.waiting import wait_for

NAME = "supervisor.0"
RUN_ID = f"kept{os.getpid()}"


class ScriptedLauncher:
    """Gives one status after the other of the one service there is, and notes what is done to it.

    A number after the state is the step of it.
    """

    def __init__(self, *states: str) -> None:
        self.states = list(states)
        self.done: list[str] = []

    def start(self, spec: ServiceSpec) -> None:
        self.done.append("start")

    def statuses(self, names: Iterable[str], deadline_s: float) -> Statuses:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        state, _, step = state.partition(" ")
        error = f"{state} it is"
        if state in list(RunState):
            told = SupervisorStatus(
                state=ServiceState.READY, error=error, run=RunState(state), step=int(step or 0)
            )
            return Statuses(dict.fromkeys(names, told))
        return Statuses(dict.fromkeys(names, ServiceStatus(state=ServiceState(state), error=error)))

    def command(self, name: str, command: Any, deadline_s: float) -> Any:
        raise AssertionError("nobody is commanded")

    def stop(self, names: Iterable[str], deadline_s: float) -> set[str]:
        raise AssertionError("nobody is stopped")

    def kill(self, name: str) -> None:
        self.done.append("kill")


def make_spec(folder: Path) -> ServiceSpec:
    config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "gsm8k"})
    return ServiceSpec("no:thing", ServiceContext(config, NAME, folder, RUN_ID), "supervisor.log")


def run(
    folder: Path, launcher: ScriptedLauncher, max_restarts: int = 2
) -> tuple[ServiceStatus, list[str], ManualClock]:
    clock, told = ManualClock(), list[str]()
    status = keep(launcher, make_spec(folder), Budget(max_restarts), clock, told.append)
    return status, told, clock


@pytest.mark.parametrize("end", ["ENDED", "FAILED"])
def test_a_supervisor_that_ended_by_itself_is_not_started_again(tmp_path: Path, end: str) -> None:
    launcher = ScriptedLauncher("STARTING", "running", end)
    status, told, _ = run(tmp_path, launcher)
    assert (status.state, launcher.done, told) == (end, ["start"], [])


def test_a_supervisor_whose_process_dies_is_started_again_with_the_reason_told(tmp_path: Path) -> None:
    launcher = ScriptedLauncher("running", "DEAD", "STARTING", "running", "ENDED")
    _, told, _ = run(tmp_path, launcher)
    assert launcher.done == ["start", "kill", "start"]
    assert told == ["its process died (DEAD it is); it was started again"]


def test_a_supervisor_that_is_silent_for_a_minute_is_killed_and_started_again(tmp_path: Path) -> None:
    launcher = ScriptedLauncher("running", *["SILENT"] * 320, "ENDED")
    _, told, clock = run(tmp_path, launcher)
    assert launcher.done == ["start", "kill", "start"]
    assert "no heartbeat" in told[0] and clock.now() > SILENCE_LIMIT_S


def test_the_process_of_a_supervisor_that_was_stopped_is_ended_before_there_is_another(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, RUN_VARIABLE: RUN_ID, SERVICE_VARIABLE: NAME}
    process = subprocess.Popen(["sleep", "60"], env=environment)
    process.send_signal(signal.SIGSTOP)
    try:
        run(tmp_path, ScriptedLauncher(*["SILENT"] * 320, "ENDED"))
        assert process.wait(60.0) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait(60.0)


def test_a_supervisor_that_was_only_slow_to_answer_is_left_alone(tmp_path: Path) -> None:
    launcher = ScriptedLauncher("running", *["SILENT"] * 200, "running", *["SILENT"] * 200, "ENDED")
    assert run(tmp_path, launcher)[1] == []
    assert launcher.done == ["start"]


def test_a_supervisor_that_dies_over_and_over_ends_the_run_with_what_it_died_of(tmp_path: Path) -> None:
    launcher = ScriptedLauncher("DEAD")
    with pytest.raises(ServiceFailed, match=r"max_restarts.*DEAD it is.*supervisor\.log"):
        run(tmp_path, launcher, max_restarts=2)
    assert launcher.done.count("start") == 3


@pytest.mark.parametrize(("step", "ends_well"), [(1, True), (0, False)])
def test_a_supervisor_may_die_as_often_as_it_likes_while_steps_are_trained_in_between(
    tmp_path: Path, step: int, ends_well: bool
) -> None:
    lives = [word for life in range(9) for word in (f"running {life}", f"running {life + step}", "DEAD")]
    launcher = (
        ScriptedLauncher(*lives, "ENDED") if step else ScriptedLauncher(*["running", "running", "DEAD"] * 9)
    )
    if ends_well:
        assert run(tmp_path, launcher, max_restarts=2)[0].state == "ENDED"
        assert launcher.done.count("start") == 10
    else:
        with pytest.raises(ServiceFailed, match="without a step in between"):
            run(tmp_path, launcher, max_restarts=2)


def named_process(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A child of this process that has the name of one of Ray's own."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    (folder / name).symlink_to(sleep)
    return subprocess.Popen([str(folder / name), "60"])


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_the_death_of_one_of_rays_own_processes_is_noticed_by_name(tmp_path: Path, victim: str) -> None:
    processes = {name: named_process(tmp_path, name) for name in ("raylet", "gcs_server", "other")}
    noticed, deaths = threading.Event(), list[str]()

    def on_death(name: str) -> None:
        deaths.append(name)
        noticed.set()

    try:
        with watching_ray(on_death):
            os.kill(processes["other"].pid, 9)
            assert not noticed.wait(0.7)
            os.kill(processes[victim].pid, 9)
            assert noticed.wait(60.0)
    finally:
        for process in processes.values():
            process.kill()
            process.wait(60.0)
    assert deaths == [victim]


def test_the_watch_of_ray_goes_on_after_it_found_no_descriptor_left(tmp_path: Path) -> None:
    raylet, noticed = named_process(tmp_path, "raylet"), threading.Event()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with watching_ray(lambda name: noticed.set()) as counters:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                wait_for(lambda: counters["failed_looks"] >= 2)
                assert is_open("127.0.0.1:1"), "that nobody could ask tells nothing of a cluster either"
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert not is_open("127.0.0.1:1") and not noticed.is_set()
            raylet.kill()
            assert noticed.wait(60.0)
    finally:
        raylet.kill()
        raylet.wait(60.0)


def fail_after_the_death_of(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    raise ConnectionError("what Ray's client says of it")


def test_what_rays_death_breaks_is_told_as_rays_death(tmp_path: Path) -> None:
    raylet, deaths = named_process(tmp_path, "raylet"), list[str]()
    with pytest.raises(ConnectionError), watching_ray(deaths.append):
        fail_after_the_death_of(raylet)
    raylet.wait(60.0)
    assert deaths[0] == "raylet"
