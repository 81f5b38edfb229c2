"""The head's last steps. They run in a process of their own: a hang is ended together with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.control.ray.head import EXIT_FAILED, _write_termination
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.roster import RUN_VARIABLE

RUN_ID = f"head{os.getpid()}"

TEAR_DOWN = """
import json, sys, threading
from pathlib import Path
from asyncrl.core.config.tree import Config
from asyncrl.control.ray import bootstrap
from asyncrl.control.ray import head
from asyncrl.control.record.live import LiveRun
from asyncrl.control.record.rundir import RunDir

def leave(*_):
    if sys.argv[3] == "hangs":
        threading.Event().wait()
    raise RuntimeError("Ray is gone")

bootstrap.leave, head.TEAR_DOWN_DEADLINE_S = leave, float(sys.argv[4])
sections = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
config = Config(**sections, launcher={"ray": "10.0.0.1:6379"})
head._tear_down(RunDir(Path(sys.argv[1])), LiveRun(**json.loads(sys.argv[2])), config)
"""


@pytest.mark.parametrize(("cluster", "deadline_s"), [("hangs", 0.3), ("fails", 60.0)])
def test_what_the_run_left_here_goes_though_its_cluster_is_gone(
    tmp_path: Path, cluster: str, deadline_s: float
) -> None:
    folder, sockets = RunDir(tmp_path), tmp_path / "sockets"
    segment = Path(f"/dev/shm/asyncrl-{RUN_ID}-left")
    sockets.mkdir()
    folder.keys.write_text("{}")
    segment.write_bytes(b"x")
    live = json.dumps({"run_id": RUN_ID, "sockets": str(sockets)})
    pipe, environment = subprocess.PIPE, {**os.environ, RUN_VARIABLE: RUN_ID}
    with subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, env=environment) as left:
        assert left.stdin and left.stdout
        left.stdin.write(b"\n")
        left.stdin.flush()
        left.stdout.readline()  # only now is its environment to be seen
        try:
            done = subprocess.run(
                [sys.executable, "-c", TEAR_DOWN, str(tmp_path), live, cluster, str(deadline_s)],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == EXIT_FAILED
            assert ("was not left within 0.3 s" if cluster == "hangs" else "Ray is gone") in done.stderr
            assert left.wait(60.0) != 0
            assert not segment.exists() and not sockets.exists() and not folder.keys.exists()
        finally:
            left.kill()
            segment.unlink(missing_ok=True)


def test_a_process_whose_clean_up_fails_after_a_hang_ends_all_the_same(tmp_path: Path) -> None:
    RunDir(tmp_path).keys.mkdir()  # cannot be removed as a file
    live = json.dumps({"run_id": RUN_ID, "sockets": str(tmp_path / "sockets")})
    done = subprocess.run(
        [sys.executable, "-c", TEAR_DOWN, str(tmp_path), live, "hangs", "0.3"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == EXIT_FAILED and "was not left within 0.3 s" in done.stderr
    assert "keys.json" in done.stderr, "what failed is told"


def test_how_a_start_ended_that_was_terminated_is_forced_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda one: synced.append(os.readlink(f"/proc/self/fd/{one}")))
    _write_termination(RunDir(tmp_path))
    assert len(synced) == 2 and "/.outcome.json." in synced[0] and synced[1] == str(tmp_path)


GIVE_UP = """
import sys
from pathlib import Path
from asyncrl.control.ray import head
from asyncrl.control.record.live import LiveRun
from asyncrl.control.record.rundir import RunDir
live = LiveRun(run_id=sys.argv[2], sockets=sys.argv[3])
head._give_up(RunDir(Path(sys.argv[1])), live, "raylet")
"""


def test_the_log_of_a_process_of_rays_that_died_outlives_rays_folder(tmp_path: Path) -> None:
    folder, sockets = RunDir(tmp_path / "run"), tmp_path / "sockets"
    logs = sockets / "ray" / "session_latest" / "logs"
    for made in (logs, folder.logs):
        made.mkdir(parents=True)
    (logs / "raylet.out").write_text("before\n")
    (logs / "raylet.err").write_text("why\n")
    command = [sys.executable, "-c", GIVE_UP, str(folder.path), RUN_ID, str(sockets)]
    done = subprocess.run(command, timeout=60)
    assert done.returncode == EXIT_FAILED
    assert folder.tail("raylet") == ["why", "before"] and not sockets.exists()
