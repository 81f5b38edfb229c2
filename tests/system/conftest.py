"""Whole runs, started as a user starts them: `asyncrl up` in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.core.runtime.faults import VARIABLE
from tests.system.parts.up_run import QUICKSTART, UpRun, asyncrl_command


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A whole run takes longer than a unit test may: its own deadlines end it before this does."""
    for item in items:
        has_own = item.get_closest_marker("timeout") is not None  # a later one on the item would win
        if Path(__file__).parent in item.path.parents and not has_own:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of this test session; built-in models are put into it once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def digit_sort(runs_dir: Path) -> Path:
    """The folder of the demo's model and data."""
    from asyncrl.planner.plan.prepare import make_builtin

    return make_builtin("builtin:digit_sort", runs_dir / "builtin", print)


STARTED: list[UpRun] = []


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """End what a failed test has left running: it would disturb the tests after it."""
    yield
    for run in STARTED:
        if run.process.poll() is None:
            run.end()


def users_environment() -> dict[str, str]:
    """Return the environment without what the tests set for themselves."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


@pytest.fixture(scope="session")
def up(runs_dir: Path) -> Callable[..., UpRun]:
    """Return a function that starts `asyncrl up` with the quickstart configuration, changed."""

    def start(
        name: str, *changes: str, config: Path = QUICKSTART, cwd: Path | None = None, interrupt: str = ""
    ) -> UpRun:
        values = [f"run.name={name}", f"run.dir={runs_dir}", *changes]
        sets = [part for value in values for part in ("--set", value)]
        command = asyncrl_command("up", str(config), *sets)
        if interrupt:  # Ctrl-C for `up` itself when somebody passes that point
            fault = f'exec env {VARIABLE}="interrupt:{interrupt}:$$" "$@"'
            command = ["sh", "-c", fault, "sh", *command]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**users_environment(), "PYTHONPATH": str(Path(__file__).parent / "parts")},
            cwd=cwd,
        )
        STARTED.append(UpRun(runs_dir / name, process))
        return STARTED[-1]

    return start
