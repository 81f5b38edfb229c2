"""Whole runs, started as a user starts them: `asyncrl up` in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncrl.control.prepare import BUILTINS, MAKE_DEADLINE_S

sys.path.insert(0, str(Path(__file__).parent))

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
UP_DEADLINE_S = 280.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A whole run takes longer than a unit test may: its own deadlines end it before this does."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


def asyncrl_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "asyncrl.cli", *arguments]


@dataclass
class UpRun:
    """One `asyncrl up` and the folder that it writes to."""

    folder: Path
    process: subprocess.Popen[str]

    @property
    def runs_dir(self) -> Path:
        return self.folder.parent

    def status(self) -> dict[str, Any]:
        """Return `asyncrl status --json`, empty while the run has no API yet."""
        found = self.command("status", "--json")
        return json.loads(found.stdout) if found.returncode == 0 else {}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        place = ["--run", self.folder.name, "--dir", str(self.runs_dir)]
        return subprocess.run(
            asyncrl_command(*arguments, *place), capture_output=True, text=True, timeout=60, check=False
        )

    def wait_for(self, claim: Callable[[dict[str, Any]], bool], deadline_s: float = 200.0) -> dict[str, Any]:
        """Wait until the run's status fulfils `claim`, and return it."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            status = self.status()
            if status and claim(status):
                return status
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended first:\n{self.finish()[1]}")
            time.sleep(0.3)
        raise AssertionError(f"waited {deadline_s:g} s; the last status was {self.status()}")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def finish(self, deadline_s: float = UP_DEADLINE_S) -> tuple[int, str]:
        """Wait for the end; return the exit code and all that was printed."""
        output, _ = self.process.communicate(timeout=deadline_s)
        return self.process.returncode, output

    def end(self) -> None:
        """End what is left of the run, as a test that failed leaves it."""
        from asyncrl.control.launch.processes import end_leftovers

        self.process.kill()
        self.process.wait(10)
        if (live := self.folder / "run.json").exists():
            end_leftovers(json.loads(live.read_text())["run_id"])

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the metric rows of learner steps."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for line in lines if "timing_s/step" in (row := json.loads(line))]


class TaskMaker:
    """Makes the demo's model and data, 40 s of one core, beside the tests that come before these."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="asyncrl-tests-")
        self._folder = Path(self._place.name) / "digit_sort"
        self._process = subprocess.Popen(
            ["nice", "-n", "10", sys.executable, "-m", BUILTINS["digit_sort"], str(self._folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def move_to(self, builtins: Path) -> None:
        """Put the folder where runs look for it, once it is whole. If it failed, the first run makes it."""
        if self._process.wait(MAKE_DEADLINE_S) == 0:
            builtins.mkdir()
            shutil.move(self._folder, builtins / "digit_sort")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._place.cleanup()


TASK_MAKER = pytest.StashKey[TaskMaker]()


def pytest_collection_finish(session: pytest.Session) -> None:
    is_wanted = any("runs_dir" in getattr(item, "fixturenames", ()) for item in session.items)
    if is_wanted and not session.config.option.collectonly:
        session.config.stash[TASK_MAKER] = TaskMaker()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if TASK_MAKER in session.config.stash:
        session.config.stash[TASK_MAKER].close()


@pytest.fixture(scope="session")
def runs_dir(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of this test session; built-in models are made in it once."""
    folder = tmp_path_factory.mktemp("runs")
    pytestconfig.stash[TASK_MAKER].move_to(folder / "builtin")
    return folder


@pytest.fixture(scope="session")
def digit_sort(runs_dir: Path) -> Path:
    """The folder of the demo's model and data."""
    from asyncrl.control.prepare import make_builtin

    return make_builtin("builtin:digit_sort", runs_dir / "builtin", print)


STARTED: list[UpRun] = []


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """End what a failed test has left running: it would disturb the tests after it."""
    yield
    for run in STARTED:
        if run.process.poll() is None:
            run.end()


@pytest.fixture(scope="session")
def up(runs_dir: Path) -> Callable[..., UpRun]:
    """Return a function that starts `asyncrl up` with the quickstart configuration, changed."""

    def start(name: str, *changes: str, config: Path = QUICKSTART, cwd: Path | None = None) -> UpRun:
        values = [f"run.name={name}", f"run.dir={runs_dir}", *changes]
        sets = [part for value in values for part in ("--set", value)]
        process = subprocess.Popen(
            asyncrl_command("up", str(config), *sets),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            cwd=cwd,
        )
        STARTED.append(UpRun(runs_dir / name, process))
        return STARTED[-1]

    return start


def leftovers(folder: Path) -> list[str]:
    """Return what a run has left: processes, sockets, shared-memory segments."""
    from asyncrl.control.launch.processes import pids_of_run

    live = json.loads((folder / "run.json").read_text())
    segments = list(Path("/dev/shm").glob(f"asyncrl-{live['run_id']}-*"))
    sockets = [live["sockets"]] if Path(live["sockets"]).exists() else []
    return [*map(str, pids_of_run(live["run_id"])), *map(str, segments), *sockets]
