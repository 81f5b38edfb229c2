"""Sweep of a node: leftovers of a run's earlier incarnations are ended by their ids, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.cli.run.start import MAX_EARLIER_STARTS, _earlier_starts
from asyncrl.control.machine.processes import pids_of_run
from asyncrl.control.ray import membership
from asyncrl.control.ray.membership import running_heads, sweep_node
from asyncrl.control.record.live import LiveRun, Start, write_live
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.roster import RUN_VARIABLE

OLD, OLDER, OTHER = (f"{kind}{os.getpid()}" for kind in ("old", "older", "other"))


@contextlib.contextmanager
def leftovers_of(run_id: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """A process, a shared-memory segment and a folder of sockets, as a killed head leaves them on a node."""
    sockets, segment = folder / f"asyncrl-{run_id}", Path(f"/dev/shm/asyncrl-{run_id}-rollout.0-1")
    sockets.mkdir()
    (sockets / "receiver.0").touch()
    segment.write_bytes(b"x")
    pipe, environment = subprocess.PIPE, {**os.environ, RUN_VARIABLE: run_id}
    with subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, env=environment) as process:
        try:
            assert process.stdin and process.stdout
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()  # only now is its environment to be seen
            yield process, segment, sockets
        finally:
            process.kill()
            segment.unlink(missing_ok=True)
            shutil.rmtree(sockets, ignore_errors=True)


def test_a_node_is_swept_of_every_earlier_life_of_the_run_and_of_nothing_else(tmp_path: Path) -> None:
    with (
        leftovers_of(OLD, tmp_path) as old,
        leftovers_of(OLDER, tmp_path) as older,
        leftovers_of(OTHER, tmp_path) as other,
    ):
        starts = [Start(run_id, str(tmp_path / f"asyncrl-{run_id}")) for run_id in (OLDER, OLD)]
        assert sweep_node(starts) == (2, 2)
        for process, segment, sockets in (old, older):
            assert process.wait(60.0) != 0 and not segment.exists() and not sockets.exists()
        process, segment, sockets = other
        assert process.poll() is None and segment.exists() and (sockets / "receiver.0").exists()
        assert sweep_node(starts) == (0, 0)


def test_a_life_knows_those_before_it_also_when_the_last_one_swept_nothing(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    known = _earlier_starts(folder)
    assert known == ()
    for number in range(MAX_EARLIER_STARTS + 2):
        start = Start(f"r{number}", f"/tmp/asyncrl-r{number}", number)
        live = LiveRun(run_id=start.run_id, sockets=start.sockets, pid=number, key="secret", earlier=known)
        write_live(folder.live, live)
        known = _earlier_starts(folder)
        assert known[-1] == start
    assert [start.run_id for start in known] == [f"r{n}" for n in range(2, MAX_EARLIER_STARTS + 2)]
    assert known[-1].pid == MAX_EARLIER_STARTS + 1, "by which a node is asked whether its head runs"


def test_only_a_head_that_lives_and_is_of_the_run_counts_as_living(tmp_path: Path) -> None:
    with leftovers_of(OLD, tmp_path) as (process, *_):
        starts = [Start(OLD, "", process.pid), Start(OLDER, "", process.pid), Start(OLD, "", 0)]
        assert running_heads(starts) == [process.pid]
    assert running_heads(starts) == []


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((0, 0), ""),
        (
            (3, 1),
            "on node 10.0.0.2: ended 3 processes that the run had left, removed 1 shared-memory segments",
        ),
        ("gave no answer within 30 s", "node 10.0.0.2 was not swept: it gave no answer within 30 s"),
    ],
)
def test_only_nodes_that_had_something_or_did_not_answer_are_told_of(answer: object, told: str) -> None:
    assert membership._describe_sweep("10.0.0.2", answer) == told


SWEEP = """
import sys
from pathlib import Path
import ray
from asyncrl.core.config.tree import Config
from asyncrl.control.ray import bootstrap
from asyncrl.control.record.live import Start
from asyncrl.core.errors import ConfigError
address, folder, *starts = sys.argv[1:]
sections = {"model": {"path": folder}, "data": {"train": folder}, "reward": {"fn": "gsm8k"}}
config = Config(**sections, run={"name": "swept", "dir": folder}, launcher={"ray": address})
starts = [Start(name, sockets, int(pid)) for name, sockets, pid in (one.split("=") for one in starts)]
try:
    bootstrap.enter(config, starts, lambda told: print("told:", told))
except ConfigError:
    if ray.is_initialized():
        print("is still in the cluster, and would clear the namespace of the run that is running")
    raise
finally:
    bootstrap.leave(config, "refused", Path(folder) / "none")
"""


def enter(address: str, folder: Path, start: str) -> subprocess.CompletedProcess[str]:
    """Enter the cluster and leave it, as a head does, after an earlier start: ID=SOCKETS=PID."""
    command = [sys.executable, "-c", SWEEP, address, str(folder), start]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


START = """
import sys
from asyncrl.core.config.tree import Config
from asyncrl.cli.run import start as run
address, folder = sys.argv[1:]
sections = {"model": {"path": folder}, "data": {"train": folder}, "reward": {"fn": "gsm8k"}}
config = Config(**sections, run={"name": "swept", "dir": folder}, launcher={"ray": address})
run.plan.check = lambda config: type("Plan", (), {"shared_memory": None, "notes": ()})
run.prepare.prepare = lambda config, say: config
run.start(config, before=lambda: sys.exit("it would have started"))
"""


def start_again(address: str, folder: Path, pid: int) -> subprocess.CompletedProcess[str]:
    """Start a run of which another machine, of the same cluster, has a head `pid` that runs."""
    run_dir = RunDir(folder / "swept")
    run_dir.path.mkdir()
    run_dir.phase.write_text("of the run that is running")
    dead = {"run_id": OLDER, "sockets": str(folder / "none"), "pid": 0, "node": "another machine"}
    write_json(run_dir.live, {**dead, "earlier": [{"run_id": OLD, "sockets": "", "pid": pid}]})
    command = [sys.executable, "-c", START, address, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_next_up_sweeps_the_nodes_of_a_cluster_unless_an_earlier_life_lives_on_one(
    tmp_path: Path,
) -> None:
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        cluster.add_node(**small, node_ip_address="127.0.0.2")
        with leftovers_of(OLD, tmp_path) as (process, segment, sockets):
            done = enter(cluster.address, tmp_path, f"{OLD}={sockets}={process.pid}")
            assert done.returncode != 0 and f"(pid {process.pid})" in done.stderr
            assert process.poll() is None and segment.exists() and sockets.exists() and not done.stdout

            done = start_again(cluster.address, tmp_path, process.pid)
            assert done.returncode != 0 and f"(pid {process.pid})" in done.stderr
            assert process.poll() is None and segment.exists(), "its run was swept"
            assert RunDir(tmp_path / "swept").phase.read_text() == "of the run that is running"

            done = enter(cluster.address, tmp_path, f"{OLD}={sockets}=0")
            assert done.returncode == 0, done.stderr
            assert process.wait(60.0) != 0 and not segment.exists() and not sockets.exists()
        assert "told: on node " in done.stdout and "ended 1 processes" in done.stdout
        assert pids_of_run(OLD) == []
    finally:
        cluster.shutdown()
