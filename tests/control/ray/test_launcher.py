"""The contract of launchers, on threads and on a real Ray."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from ray._raylet import AuthenticationTokenLoader
from ray._raylet import Config as RayConfig
from thread_launcher import ThreadLauncher

from asyncrl.control.machine.processes import (
    end_leftovers,
    end_service,
    is_alive,
    pids_of_run,
    pids_of_service,
)
from asyncrl.control.ray import launcher as ray_launcher
from asyncrl.control.ray.launcher import Launcher
from asyncrl.control.ray.membership import NEEDS_TOKEN
from asyncrl.control.roster import ServiceSpec
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.service import ServiceContext
from asyncrl.core.service_command import Bound, DeregisterReplica, Drain, Promote, Tighten
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ServiceStatus
from asyncrl.core.status.statuses import pack_status
from tests.other_user import NOBODY, acting_as

RUN_ID = f"test{os.getpid()}"


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """The private folder of a run, where the path is as long as one may be."""
    length = ray_launcher.MAX_BASE_BYTES - len("/tmp/12345678")
    base = Path(tempfile.mkdtemp(prefix="x" * length, dir="/tmp"))
    assert len(str(base)) == ray_launcher.MAX_BASE_BYTES
    folder = base / "asyncrl-01234567"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def ray_started(ray_folder: Path) -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"  # a cluster that we were not asked to join
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    os.environ["RAY_AUTH_TOKEN"] = "of another cluster"
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # a learner of another test has none
    ray_launcher.start_local(ray_folder, num_cpus=2, num_gpus=1)
    yield
    ray_launcher.shut_down()
    end_leftovers(RUN_ID)
    if hidden is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = hidden
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        del os.environ[name]
    RayConfig.initialize("")  # for tests of other clusters in this process
    AuthenticationTokenLoader.instance().reset_cache()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(params=["threads", "ray"])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "threads":
        return ThreadLauncher()
    request.getfixturevalue("ray_started")
    return ray_launcher.RayLauncher("tests")


def make_spec(folder: Path, name: str, function: str = "build") -> ServiceSpec:
    config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "gsm8k"})
    context = ServiceContext(config, name, folder, RUN_ID)
    return ServiceSpec(f"trivial_service:{function}", context, str(folder / f"{name}.log"))


def await_state(launcher: Launcher, name: str, *states: str) -> ServiceStatus:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        status = launcher.statuses([name], 5.0)[name]
        if status.state in states:
            return status
        time.sleep(0.05)
    raise AssertionError(status)


def test_a_service_is_started_asked_told_and_stopped(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start(make_spec(tmp_path, "a.0"))
    assert await_state(launcher, "a.0", "READY").failure == "a.0"
    assert launcher.command("a.0", Tighten(1), 5.0) == Bound(1)
    assert launcher.stop(["a.0"], 5.0) == {"a.0"}
    await_state(launcher, "a.0", "ENDED")
    launcher.kill("a.0")


def test_a_service_that_fails_says_why(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start(make_spec(tmp_path, "b.0"))
    await_state(launcher, "b.0", "READY")
    launcher.command("b.0", Promote(), 5.0)
    assert "boom as asked" in str(await_state(launcher, "b.0", "FAILED").error)
    launcher.kill("b.0")


@pytest.mark.long
def test_services_with_shares_of_a_gpu_are_on_the_same_one(ray_started: None, tmp_path: Path) -> None:
    """Of a machine that Ray is told to have a GPU: no service here looks for it."""
    launcher, names = ray_launcher.RayLauncher("tests"), ("g.0", "g.1")
    for name in names:
        launcher.start(dataclasses.replace(make_spec(tmp_path, name, "build_seeing"), gpus=0.5))
    assert [await_state(launcher, name, "READY").failure for name in names] == ["0", "0"]
    launcher.start(make_spec(tmp_path, "g.2", "build_seeing"))
    assert await_state(launcher, "g.2", "READY").failure == "", "without a share it sees none"
    for name in (*names, "g.2"):
        launcher.kill(name)


def test_a_process_that_dies_is_gone_and_its_log_stays(ray_started: None, tmp_path: Path) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    launcher.start(make_spec(tmp_path, "c.0"))
    await_state(launcher, "c.0", "READY")
    with pytest.raises(ServiceFailed, match=r"c\.0 failed 'deregister'"):
        launcher.command("c.0", DeregisterReplica("c.0"), 10.0)
    assert await_state(launcher, "c.0", "DEAD").error == ray_launcher.KILLED
    assert "c.0 runs" in (tmp_path / "c.0.log").read_text()


def test_ray_starts_no_process_that_no_service_asked_for(ray_started: None, tmp_path: Path) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    launcher.start(make_spec(tmp_path, "i.0"))
    await_state(launcher, "i.0", "READY")
    lines = [one.cmdline() for one in psutil.Process().children(recursive=True)]
    assert any("ServiceHost" in line[0] for line in lines if line)
    is_idle = ("ray::IDLE", "default_worker.py")
    assert not [line for line in lines if any(word.strip().endswith(is_idle) for word in line)]
    launcher.kill("i.0")


def test_a_service_that_cannot_be_built_is_failed_with_its_error(ray_started: None, tmp_path: Path) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    launcher.start(make_spec(tmp_path, "d.0", "build_broken"))
    assert "no model in models/nowhere" in str(await_state(launcher, "d.0", "FAILED").error)
    launcher.kill("d.0")


def test_every_process_of_a_run_is_found_by_its_mark_and_ended(ray_started: None, tmp_path: Path) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    launcher.start(make_spec(tmp_path, "e.0"))
    pid = await_state(launcher, "e.0", "READY").pid
    assert isinstance(pid, int) and pid in pids_of_run(RUN_ID)
    assert not is_alive(os.getpid(), RUN_ID), "the test's own process has no mark"
    assert end_leftovers(RUN_ID) >= 1
    assert not is_alive(pid, RUN_ID)


@pytest.mark.parametrize(
    ("name", "function", "why"),
    [
        ("m.0", "build_mute", "its status failed: ValueError: no status today"),
        (
            "publisher.9",
            "build_impostor",
            "its status cannot be read: what it sent is no status of a publisher",
        ),
    ],
)
def test_a_service_whose_status_cannot_be_had_has_failed(
    ray_started: None, tmp_path: Path, name: str, function: str, why: str
) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    launcher.start(make_spec(tmp_path, name, function))
    assert await_state(launcher, name, "FAILED").error.startswith(why)
    assert launcher.counters["refused_statuses"] == (1 if function == "build_impostor" else 0)
    launcher.kill(name)


def test_a_service_that_no_node_has_room_for_is_dead(ray_started: None, tmp_path: Path) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    spec = make_spec(tmp_path, "n.0")
    launcher.start(dataclasses.replace(spec, node="0" * 56))
    assert "is not schedulable" in await_state(launcher, "n.0", "DEAD").error
    launcher.kill("n.0")


@ray.remote(max_retries=0, num_cpus=0)
def lose_answer() -> bytes:
    """Die instead of answering, as the process that holds an answer may."""
    os._exit(1)


def test_a_status_that_ray_has_lost_is_asked_for_again(ray_started: None, tmp_path: Path) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    launcher.start(make_spec(tmp_path, "l.0"))
    await_state(launcher, "l.0", "READY")
    launcher._asked["l.0"] = lose_answer.remote()
    assert launcher.statuses(["l.0"], 60.0)["l.0"] == ServiceStatus(state=ServiceState.SILENT)
    assert launcher.counters["lost_statuses"] == 1
    assert launcher.statuses(["l.0"], 60.0)["l.0"].state == "READY"
    launcher.kill("l.0")


@ray.remote(num_cpus=0, max_restarts=1)
class Restarted:
    """Dies in its first answer, after which Ray starts it once more; then it is ready."""

    def __init__(self, began: Path) -> None:
        self._is_second = began.exists()
        began.touch()

    def status(self) -> bytes:
        """Tell that it is ready, the second time."""
        if not self._is_second:
            os._exit(1)
        return pack_status(ServiceStatus(state=ServiceState.READY))


def test_a_service_that_ray_cannot_reach_for_now_is_silent_and_asked_again(
    ray_started: None, tmp_path: Path
) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    launcher._actors["u.0"] = Restarted.remote(tmp_path / "began")
    assert launcher.statuses(["u.0"], 60.0)["u.0"] == ServiceStatus(state=ServiceState.SILENT)
    assert launcher.counters["lost_statuses"] == 0
    assert await_state(launcher, "u.0", "READY").error == ""
    launcher.kill("u.0")


def test_a_service_whose_environment_ray_cannot_make_is_dead_with_why(ray_started: None) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    nowhere = {"working_dir": "file:///nowhere.zip"}
    launcher._actors["v.0"] = Restarted.options(runtime_env=nowhere).remote(Path("began"))
    found = launcher.statuses(["v.0"], 60.0)["v.0"]
    assert found == ServiceStatus(state=ServiceState.DEAD, error="Failed to set up runtime environment.")
    launcher.kill("v.0")


@pytest.mark.long
def test_a_service_that_is_still_built_refuses_a_command_in_one_plain_sentence(
    ray_started: None, tmp_path: Path
) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    launcher.start(make_spec(tmp_path, "g.0", "build_waiting"))
    await_state(launcher, "g.0", "STARTING")
    with pytest.raises(ServiceFailed) as caught:
        launcher.command("g.0", Drain(), 30.0)
    assert str(caught.value) == "g.0 is still starting and cannot 'drain'"
    (tmp_path / "back").touch()
    await_state(launcher, "g.0", "READY")
    launcher.kill("g.0")


def test_another_launcher_takes_charge_of_who_lives_and_a_stopped_one_is_replaced(
    ray_started: None, tmp_path: Path
) -> None:
    ray_launcher.RayLauncher("tests").start(make_spec(tmp_path, "f.0"))
    launcher = ray_launcher.RayLauncher("tests")
    assert "f.0" in launcher.adopt()
    pid = await_state(launcher, "f.0", "READY").pid
    assert isinstance(pid, int)
    assert pid in pids_of_service(RUN_ID, "f.0")
    os.kill(pid, signal.SIGSTOP)
    assert launcher.statuses(["f.0"], 0.3)["f.0"] == ServiceStatus(state=ServiceState.SILENT)
    launcher.kill("f.0")
    assert end_service(RUN_ID, "f.0") == []
    launcher.start(make_spec(tmp_path, "f.0"))
    assert await_state(launcher, "f.0", "READY").pid != pid
    assert launcher.statuses(["g.0"], 1.0)["g.0"].state == "DEAD"
    launcher.kill("f.0")


NUM_CALLS, KEPT_BYTES = 3000, 1000


def test_rays_server_keeps_nothing_of_the_calls_of_a_run(ray_started: None, tmp_path: Path) -> None:
    """By default it keeps 4,300 bytes of each, to show them on its dashboard."""
    launcher = ray_launcher.RayLauncher("tests")
    launcher.start(make_spec(tmp_path, "k.0"))
    await_state(launcher, "k.0", "READY")
    (server,) = [one for one in psutil.Process().children(recursive=True) if one.name() == "gcs_server"]
    actor = ray.get_actor("k.0", namespace="tests")
    before = server.memory_info().rss
    for _ in range(NUM_CALLS // 100):
        ray.get([actor.status.remote() for _ in range(100)], timeout=60.0)
    time.sleep(2.0)  # Ray reports once a second
    assert server.memory_info().rss - before < NUM_CALLS * KEPT_BYTES
    launcher.kill("k.0")


STRANGER = """
import sys
from asyncrl.control.ray.membership import home_node, join
join(sys.argv[1], "stranger")
print("inside", home_node())
"""


def join(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Join the Ray of this process from another one, which tries twice, not the twenty times of Ray's own."""
    address = ray.get_runtime_context().gcs_address
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", STRANGER, address]
    others["RAY_NUM_REDIS_GET_RETRIES"] = "2"
    return subprocess.run(command, env=others | variables, capture_output=True, text=True, timeout=200)


@pytest.mark.usefixtures("ray_started")
def test_ray_obeys_nobody_without_the_token_of_the_run(ray_folder: Path) -> None:
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert token.parent == ray_folder and token.stat().st_mode & 0o777 == 0o600
    found = join({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    assert "inside" in found.stdout, found.stderr
    asked = {"RAY_AUTH_MODE": "token"}
    with ThreadPoolExecutor() as strangers:
        refused = list(strangers.map(join, ({}, asked, {**asked, "RAY_AUTH_TOKEN": "guess"})))
    for found in refused:
        assert found.returncode != 0 and "inside" not in found.stdout, found.args
        assert NEEDS_TOKEN in found.stderr, found.stderr


def test_nobody_else_gets_to_the_folders_that_ray_opens_to_all(ray_started: None, ray_folder: Path) -> None:
    sockets = ray_folder / ray_launcher.RAY / "session_latest" / "sockets"
    assert {path.name for path in sockets.iterdir()} >= {"raylet", "plasma_store"}
    assert sockets.stat().st_mode & 0o777 == 0o777, "Ray's own modes"
    with acting_as(NOBODY), pytest.raises(PermissionError):
        os.rename(sockets / "raylet", sockets / "gone")


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
@pytest.mark.parametrize("num_more", [0, 1])
def test_a_run_has_its_folder_where_ray_would_unless_the_paths_of_sockets_grew_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, num_more: int
) -> None:
    base = Path("/tmp") / ("x" * (ray_launcher.MAX_BASE_BYTES - len("/tmp/") + num_more))
    base.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)  # what was found before
    monkeypatch.setenv(variable, str(base))
    try:
        assert ray_launcher.base_folder() == (Path("/tmp") if num_more else base)
    finally:
        base.rmdir()


def test_a_service_whose_status_cannot_be_read_has_failed_by_that_name(ray_started: None) -> None:
    launcher = ray_launcher.RayLauncher("tests")
    found = launcher._read("buffer.0", ray.put(b"no status"))
    assert found.state == ServiceState.FAILED and "no status of a buffer" in found.error
    assert launcher.counters == {"refused_statuses": 1}
