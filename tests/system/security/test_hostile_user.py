"""A hostile user of the machine while an ordinary user's run starts: it trains on, and he gets nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.control.machine.processes import (
    end_leftovers,
    is_stopped,
    pids_of_run,
    remove_leftovers,
    shared_memory_of,
)
from asyncrl.core.runtime.faults import VARIABLE
from tests.other_user import CHECKOUT, NOBODY, acting_as, command_as
from tests.system.parts.hostile_user import PLACES
from tests.system.parts.up_run import QUICKSTART, UpRun, asyncrl_command

OWNER = 100_000 + os.getpid()
"""Of the run: a user whom no other program of this machine has."""
AGAIN = (
    *("up.reading", "up.checking", "up.preparing", "up.head", "head.ray", "head.supervisor"),
    *("supervisor.begun", "learner.publishing", "publisher.commit", "rollout.engine", "receiver.map"),
    *("receiver.bucket", "receiver.commit", "rollout.swapped", "learner.reserved", "learner.updated"),
)
"""Points of a start from the first words to the first update; SIGSTOP holds the process that passes one."""
FIRST = (*AGAIN, "up.making")
GUESSED = (f"torchinductor_uid_{OWNER}", f"asyncrl-{OWNER}", f"ray-{OWNER}", f"vllm-{OWNER}")
SHORT = ("rollout.replicas=1", "eval.every_steps=0", "checkpoint.every_steps=10")
TCP = ("launcher.host=127.0.0.1", "launcher.curve=on")
REDIS = ("buffer.journal=redis", "buffer.url=managed")
START_S = 900.0


@pytest.fixture
def home() -> Iterator[Path]:
    """The home of an ordinary user, which others may pass through."""
    folder = Path(tempfile.mkdtemp(prefix="home-"))
    folder.chmod(0o711)
    os.chown(folder, OWNER, OWNER)
    yield folder
    shutil.rmtree(folder)


class HostileUser:
    """A process of another user, who does what he can whenever he is told to."""

    def __init__(self) -> None:
        module = (sys.executable, "-m", "tests.system.parts.hostile_user", str(OWNER))
        self._process = subprocess.Popen(
            command_as(NOBODY, *module), stdin=-1, stdout=-1, text=True, cwd=CHECKOUT
        )
        self.told: dict[str, Any] = {}

    def strike(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{' '.join(GUESSED)}\n")
        self._process.stdin.flush()
        self.told = json.loads(self._process.stdout.readline())

    def leave(self) -> None:
        self._process.communicate(timeout=60)


@contextlib.contextmanager
def started(home: Path, points: tuple[str, ...], *changes: str) -> Iterator[UpRun]:
    """A run of an ordinary user, of which each process is held at the points that it passes."""
    values = ["run.name=a", f"run.dir={home / 'runs'}", *SHORT, *changes]
    sets = [part for value in values for part in ("--set", value)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(CHECKOUT)}
    process = subprocess.Popen(
        command_as(OWNER, *asyncrl_command("up", str(QUICKSTART), *sets)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=home,
        env={**environment, VARIABLE: " ".join(f"stop:{point}" for point in points)},
    )
    run = UpRun(home / "runs" / "a", process)
    try:
        yield run
    finally:
        process.kill()
        process.wait(10.0)
        if live := live_of(run):
            end_leftovers(live["run_id"])
            with acting_as(OWNER):
                remove_leftovers(live["run_id"], Path(live["sockets"]))


def live_of(run: UpRun) -> dict[str, Any]:
    path = run.folder / "run.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def attend(run: UpRun, hostile: HostileUser, num_points: int) -> None:
    """Whenever a process of the run is held at a point, let the hostile user act; then let it go on."""
    end, num_held = time.monotonic() + START_S, 0
    while num_held < num_points:
        live = live_of(run)
        for pid in filter(is_stopped, {run.process.pid, *(pids_of_run(live["run_id"]) if live else ())}):
            hostile.strike()
            os.kill(pid, signal.SIGCONT)
            num_held += 1
        assert run.process.poll() is None, run.finish()[1]
        assert time.monotonic() < end, f"held at {num_held} of {num_points} points: {run.told}"
        time.sleep(0.1)


def left_by(uid: int, home: Path) -> list[str]:
    return [
        str(path)
        for place in PLACES
        for path in place.iterdir()
        if path.lstat().st_uid == uid and path != home
    ]


def test_the_hostile_user_gets_what_is_open_and_knows_who_has_used_his_own(home: Path) -> None:
    home.chmod(0o777)
    hostile = HostileUser()
    try:
        hostile.strike()
        assert {f"read {home}", f"make {home}"} <= set(hostile.told["got"])
        assert hostile.told["used"] == []
        guessed = PLACES[0] / GUESSED[0]
        (guessed / "compiled").mkdir()
        hostile.strike()
        assert hostile.told["used"] == [str(guessed)]
    finally:
        hostile.leave()


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("journal", [(), REDIS], ids=["file", "redis"])
def test_a_run_trains_on_whatever_another_user_does_at_every_moment_of_its_start(
    home: Path, journal: tuple[str, ...]
) -> None:
    """Two lives of one run: in the second one he has taken every name that the first one had."""
    hostile, steps = HostileUser(), 0
    try:
        for points, places in ((FIRST, ()), (AGAIN, TCP)):
            steps += 5
            hostile.strike()
            with started(home, points, f"learner.steps={steps}", *places, *journal) as run:
                attend(run, hostile, len(points))
                code, output = run.finish()
                hostile.strike()
            told = hostile.told
            print(told)
            assert code == 0, output
            assert told["held"] > told["seen"] > 0 and told["taken"] > len(GUESSED)
            assert (told["got"], told["used"], told["callers"]) == ([], [], 0)
            assert [row["training/global_step"] for row in run.rows()] == list(range(1, steps + 1))
            assert run.summary()["ledger_residue"] == 0
            live = live_of(run)
            with acting_as(OWNER):
                assert shared_memory_of(live["run_id"]) == []
            assert pids_of_run(live["run_id"]) == [] and left_by(OWNER, home) == []
    finally:
        hostile.leave()
