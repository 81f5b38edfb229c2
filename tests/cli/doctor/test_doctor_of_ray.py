"""Findings of `asyncrl doctor` about Ray, its ports, and the leftovers of dead runs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.cli.doctor import ray
from asyncrl.cli.doctor.files import look_at
from asyncrl.control.machine.ports import HeldPort
from asyncrl.control.roster import RUN_VARIABLE
from tests.cli.commands.calling import asyncrl
from tests.setup.suite.core_alone import needs_all

RUN_ID = f"orphan{os.getpid()}"


def test_every_finding_about_ray_is_a_line_and_says_what_to_do_where_it_is_needed(tmp_path: Path) -> None:
    found = {one["what"]: one for one in json.loads(asyncrl("doctor", "--json", "--dir", tmp_path).out)}
    whats = ("ray", "server ports", "outgoing ports", "object store", "processes", "ray sessions")
    for what in whats:
        assert bool(found[what]["advice"]) is (found[what]["verdict"] != "ok")
    assert list(found)[-1] == "ray sessions", "no cluster is joined unless it is named"


@needs_all
@pytest.mark.parametrize(
    ("pin", "verdict", "said"), [("2.0.0", "warn", "(tested: 2.0.0)"), ("", "ok", "as tested")]
)
def test_another_ray_than_the_tested_one_is_told(tmp_path: Path, pin: str, verdict: str, said: str) -> None:
    pin = pin or str(ray.installed_version("ray"))
    for name in ("cpu.txt", "gpu.txt"):
        (tmp_path / name).write_text(f"ray=={pin}\n")
    (found,) = ray.check_version(tmp_path)
    assert found.verdict == verdict and said in found.found


@pytest.mark.parametrize(
    ("range_of_system", "verdict"),
    [("32768 60999", "ok"), ("15000 60999", "warn"), ("1024 19999", "warn"), ("1024 9999", "ok")],
)
def test_outgoing_connections_must_leave_the_servers_their_ports(
    tmp_path: Path, range_of_system: str, verdict: str
) -> None:
    (tmp_path / "range").write_text(range_of_system.replace(" ", "\t") + "\n")
    _, found = ray.check_ports(tmp_path / "range")
    assert found.verdict == verdict and bool(found.advice) is (verdict == "warn")


def test_a_range_of_ports_that_others_have_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(HeldPort()).number for _ in range(3)]
        monkeypatch.setattr(ray, "PORTS", _Row(taken))
        found, _ = ray.check_ports()
        assert found.verdict == "warn" and "3 of 3 tried are taken" in found.found


class _Row(list[int]):
    """Ports that lie apart."""

    start, stop = 1, 65_536

    def __getitem__(self, which: object) -> list[int]:  # type: ignore[override]
        return list(self)


def test_an_object_store_that_leaves_no_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (roomy,) = ray.check_object_store()
    monkeypatch.setattr(ray, "OBJECT_STORE_BYTES", 1 << 60)
    (narrow,) = ray.check_object_store()
    assert (roomy.verdict, narrow.verdict) == ("ok", "warn")
    assert "ray start --object-store-memory=" in narrow.advice


@contextlib.contextmanager
def marked(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    code = "import time; print(flush=True); time.sleep(60)"
    command, environment = [sys.executable, "-c", code, *arguments], {**os.environ, RUN_VARIABLE: RUN_ID}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # a process that is still in its exec shows no arguments
        try:
            yield process
        finally:
            process.kill()


def test_processes_of_a_run_without_a_head_are_named_and_those_of_a_live_one_are_not() -> None:
    with marked() as process:
        (found,) = ray.check_processes()
        assert found.verdict == "warn" and RUN_ID in found.found and str(process.pid) in found.found
        assert "no other node" in found.advice and "kill" not in found.advice, "a cluster has more machines"
        with marked("-m", ray.HEAD_MODULE):
            (found,) = ray.check_processes()
            assert RUN_ID not in found.found


def test_sessions_that_no_process_uses_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_cluster, of_run = tmp_path / "ray", tmp_path / "asyncrl-01234567" / "ray"
    first, name = "session_2026-01-01_00-00-00_1_1", "session_2026-01-02_00-00-00_1_2"
    for session in (of_cluster / first, of_run / name):
        (session / "logs").mkdir(parents=True)
        (session / "logs" / "raylet.out").write_bytes(bytes(1000))
    (of_run / "session_latest").symlink_to(of_run / name)
    with marked(f"--session-name={name}"):
        (found,) = ray.check_sessions(tmp_path)
        assert found.verdict == "ok" and "1 in use, 1 ended ones" in found.found
    monkeypatch.setattr(ray, "MUCH_BYTES", 1000)
    with marked(f"--session-name={name}"):
        (found,) = ray.check_sessions(tmp_path)
        assert found.verdict == "warn" and "session_2026-01-01_00-00-00_1_1" in found.advice
        assert name not in found.advice and "*" not in found.advice, "it is in use"
    monkeypatch.setattr(ray, "MAX_NAMED", 1)
    (found,) = ray.check_sessions(tmp_path)
    assert "2 ended" in found.found and found.advice.endswith(", and 1 more")


def test_sessions_are_looked_for_where_ray_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short, or runs have another
        (Path(folder) / "ray" / "session_2026-01-01_00-00-00_1_1").mkdir(parents=True)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        (found,) = ray.check_sessions()
        assert "1 ended ones" in found.found and folder in found.found


def test_a_session_that_is_removed_meanwhile_is_no_error(tmp_path: Path) -> None:
    gone = tmp_path / "session_2026-01-01_00-00-00_1_1"
    assert not ray._is_ours(gone) and look_at(gone / "logs") is None
    assert ray._measure([gone]) == (0, True)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere", "127.0.0.1:no"])
def test_a_cluster_that_does_not_answer_is_a_failure(address: str) -> None:
    (found,) = ray.check_cluster(address)
    assert found.verdict == "fail" and "ray start --head" in found.advice


def test_a_number_that_is_no_port_is_not_called_by_its_lower_half() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] + (1 << 16)
        (found,) = ray.check_cluster(f"127.0.0.1:{port}")
    assert found.verdict == "fail" and f"{port} is no port" in found.found


def test_a_cluster_that_answers_says_how_it_sees_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_check_nodes", lambda address: iter(()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (found,) = ray.check_cluster(f"127.0.0.1:{listener.getsockname()[1]}")
    assert found.verdict == "ok" and "sees this machine as 127.0.0.1" in found.found


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_cluster_of_two_nodes_is_joined_and_compared(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        cluster.add_node(**small, node_ip_address="127.0.0.2")
        command = [sys.executable, "-m", "asyncrl.cli", "doctor", "--ray", cluster.address, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    finally:
        cluster.shutdown()
    found = {one["what"]: one for one in json.loads(done.stdout)}
    assert "127.0.0.2 1 CPUs 0 GPUs" in found["nodes"]["found"]
    assert found["packages of nodes"]["verdict"] == "ok", found["packages of nodes"]
