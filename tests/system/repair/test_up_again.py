"""Deaths that a run cannot repair from within: of its supervisor, its head, Ray's own processes, the machine.

The first is repaired by the head, while watchers and services go on; after the others `asyncrl up` again
ends what is left by pid and goes on from the journal and the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.control.machine.processes import pids_of_run, pids_of_service
from tests.system.parts.up_run import UpRun, asyncrl_command, leftovers

SHORT = ("learner.steps=5000", "rollout.replicas=1", "eval.every_steps=0", "checkpoint.every_steps=10")
SUPERVISOR = "supervisor.0"

pytestmark = pytest.mark.long


def live_of(run: UpRun) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / "run.json").read_text())
    return found


def pids_of(status: dict[str, Any]) -> dict[str, int]:
    return {name: service["pid"] for name, service in status["services"].items()}


def check_account(run: UpRun) -> None:
    command = asyncrl_command("verify", run.folder.name, "--dir", str(run.runs_dir))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [row["training/global_step"] for row in run.rows()]
    assert set(steps) == set(range(1, max(steps) + 1)), "a step is missing on record"


def go_on_and_end(up: Callable[..., UpRun], dead: UpRun) -> None:
    """`up` once more: it resumes where the record ends or a little before, trains, and ends in order."""
    last = len({row["training/global_step"] for row in dead.rows()})
    again = up(dead.folder.name, *SHORT)
    resumed = again.wait_for(lambda status: status["step"] >= last + 5)
    assert 0 < resumed["resumed_step"] <= last
    assert resumed["ledger"]["residue"] == 0
    assert again.command("down").returncode == 0
    code, output = again.finish()
    assert code == 0, output
    assert leftovers(again.folder) == []
    check_account(again)


def test_a_killed_supervisor_is_replaced_while_services_and_watchers_go_on_and_a_killed_head_is_begun_anew(
    up: Callable[..., UpRun],
) -> None:
    run = up("beheaded", *SHORT)
    before = run.wait_for(lambda status: status["step"] >= 12)
    live = live_of(run)
    watcher = up("beheaded", *SHORT)
    for pid in pids_of_service(live["run_id"], SUPERVISOR):
        os.kill(pid, signal.SIGKILL)
    after = run.wait_for(lambda status: status["step"] >= before["step"] + 20)
    assert pids_of(after) == pids_of(before), "somebody else was restarted"
    assert {key: live_of(run)[key] for key in ("url", "key", "pid")} == {
        key: live[key] for key in ("url", "key", "pid")
    }
    assert after["ledger"]["residue"] == 0
    assert watcher.process.poll() is None, "the second `up` watches the same run"
    watcher.process.send_signal(signal.SIGHUP)
    assert watcher.process.wait(20) == -signal.SIGHUP
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert [event["service"] for event in events if event["kind"] == "restart"] == [SUPERVISOR]
    assert run.process.poll() is None, "hanging up has ended the run"

    os.kill(live["pid"], signal.SIGKILL)
    code, output = run.finish()
    assert code == 1 and "the head process died" in output, output
    assert "Saved: the checkpoint of step" in output and "To go on: asyncrl up" in output
    assert leftovers(run.folder) == []
    go_on_and_end(up, run)


def ray_process(run: UpRun, name: str) -> int:
    children = psutil.Process(live_of(run)["pid"]).children()
    return next(child.pid for child in children if child.name() == name)


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_death_of_rays_own_processes_ends_the_run_with_their_name_and_up_again_goes_on(
    up: Callable[..., UpRun], name: str
) -> None:
    run = up(f"without-{name}", *SHORT)
    run.wait_for(lambda status: status["step"] >= 12)
    os.kill(ray_process(run, name), signal.SIGKILL)
    code, output = run.finish(60.0)
    assert code == 1 and f"Ray's process {name} died" in output, output
    assert leftovers(run.folder) == []
    go_on_and_end(up, run)


def test_after_the_death_of_the_machine_up_again_goes_on(up: Callable[..., UpRun]) -> None:
    run = up("unplugged", *SHORT)
    run.wait_for(lambda status: status["step"] >= 12)
    live = live_of(run)
    for pid in (run.process.pid, live["pid"], *pids_of_run(live["run_id"])):
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    run.process.wait(10)
    go_on_and_end(up, run)
    sockets, segments = Path(live["sockets"]), Path("/dev/shm").glob(f"asyncrl-{live['run_id']}-*")
    assert not sockets.exists() and not list(segments), "what the first life left is still there"


def test_a_moved_run_with_a_torn_checkpoint_goes_on_from_the_one_before_and_says_so(
    up: Callable[..., UpRun], tmp_path: Path
) -> None:
    settings = ("rollout.replicas=1", "eval.every_steps=0", "checkpoint.every_steps=4")
    run = up("movable", *settings, "learner.steps=8")
    code, output = run.finish()
    assert code == 0, output
    moved = UpRun(tmp_path / "elsewhere" / "renamed", run.process)
    shutil.move(run.folder, moved.folder)
    newest = moved.folder / "checkpoints" / "step-00000008"
    largest = max(newest.iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    again = up("renamed", *settings, "learner.steps=12", f"run.dir={moved.runs_dir}")
    again.folder = moved.folder
    code, output = again.finish()
    assert code == 0, output
    assert "step 8 is torn: " in output and "; going on from step 4" in output
    assert "resumed at step 4, residue 0" in output
    events = [json.loads(line) for line in (moved.folder / "events.jsonl").read_text().splitlines()]
    assert any(one["kind"] == "checkpoint" and "step 8 is torn" in one["text"] for one in events)
    assert again.rows()[-1]["training/global_step"] == 12
    assert leftovers(moved.folder) == []
    check_account(again)
