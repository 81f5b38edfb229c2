"""The limit of processes of a container is told before a run is started, and in why a service is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.control.machine.process_limit import RECENT_S, RefusedProcesses, find_limit
from asyncrl.control.record.events import load_events
from asyncrl.control.record.outcome import Outcome
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.rows.row_fetcher import RowFetcher
from asyncrl.core import service_command
from asyncrl.core.states import RunState
from asyncrl.planner.plan import machine
from tests.control.supervisor.test_repair import Run
from tests.threads import RUNTIME

V2, V1 = "0::/pod\n", "8:pids:/pod\n4:memory:/pod\n0::/\n"
PLACES = pytest.mark.parametrize(
    ("groups", "place"),
    [
        (V2, "sys/fs/cgroup/pod"),
        (V2, "sys/fs/cgroup"),
        (V1, "sys/fs/cgroup/pids/pod"),
        (V1, "sys/fs/cgroup/pids"),
    ],
)
SAID = "the kernel has refused 2 times to start a process or thread: this container may have 300 ({})"

STOPPED = Outcome(state=RunState.STOPPED)


def write(root: Path, groups: str, place: str, most: str = "300", used: int = 200, refused: int = 3) -> None:
    for name, text in {
        "proc/self/cgroup": groups,
        f"{place}/pids.max": f"{most}\n",
        f"{place}/pids.current": f"{used}\n",
        f"{place}/pids.events": f"max {refused}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@PLACES
def test_the_limit_is_found_in_every_version_and_above(tmp_path: Path, groups: str, place: str) -> None:
    assert find_limit(tmp_path) is None
    write(tmp_path, groups, place, most="max")
    assert find_limit(tmp_path) is None
    write(tmp_path, groups, place)
    found = find_limit(tmp_path)
    assert found is not None and (found.most, found.used) == (300, 200)
    assert found.file == tmp_path / place / "pids.max"


@PLACES
def test_what_was_refused_is_told_for_a_minute(tmp_path: Path, groups: str, place: str) -> None:
    write(tmp_path, groups, place)
    refused = RefusedProcesses(tmp_path)
    refused.look(1.0)
    assert refused.recent(1.0) == refused.total() == "", "what was before says nothing"
    write(tmp_path, groups, place, refused=5)
    refused.look(2.0)
    told = SAID.format(tmp_path / place / "pids.max")
    assert refused.recent(2.0) == refused.recent(1.0 + RECENT_S) == refused.total() == told
    assert refused.recent(2.0 + RECENT_S) == ""


def test_a_machine_without_counts_is_no_hindrance(tmp_path: Path) -> None:
    refused = RefusedProcesses(tmp_path)
    write(tmp_path, "nonsense\n0::/\n", "sys/fs/cgroup", most="many")
    refused.look(1.0)
    assert refused.recent(1.0) == refused.total() == "" and find_limit(tmp_path) is None


def test_a_container_with_too_few_processes_is_told_before_a_run_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, V1, "sys/fs/cgroup/pids/pod", most="1000", used=1000 - machine.MIN_THREADS)
    monkeypatch.setattr(machine, "find_limit", lambda: find_limit(tmp_path))
    assert not "".join(machine.check_limits(None))  # type: ignore[arg-type]
    write(tmp_path, V1, "sys/fs/cgroup/pids/pod", most="1000", used=1001 - machine.MIN_THREADS)
    (told,) = machine.check_limits(None)  # type: ignore[arg-type]
    assert "this container may have 1000 processes and threads and has 489" in told and "pids.max" in told


def test_a_service_that_died_as_one_was_refused_is_told_with_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root, V2, "sys/fs/cgroup")
    run = Run(tmp_path)
    run.upkeep._kernel.refused = RefusedProcesses(root)
    run.begin()
    write(root, V2, "sys/fs/cgroup", refused=5)
    run.launcher.gone.add("learner.0")
    run.pulse()
    run.upkeep.stop(5.0, STOPPED)
    (told,) = [one["text"] for one in load_events(RunDir(tmp_path).events) if one["kind"] == "exit"]
    assert told == f"learner.0 gone: it was killed; {SAID.format(root / 'sys/fs/cgroup/pids.max')}"


def test_a_pulse_in_which_no_thread_can_be_started_asks_for_rows_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Rows:
        def command(self, *_: object) -> dict[str, object]:
            return service_command.Rows(0, ())

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    fetcher = RowFetcher(Rows(), RUNTIME)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        assert fetcher.fetch(1, 0, 1.0) is None
    found = fetcher.fetch(1, 0, 10.0)
    assert found is not None and found.first == 0
