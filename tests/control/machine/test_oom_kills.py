"""A process that the kernel killed for want of memory is named in why a service is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.control.machine.oom import RECENT_S, OomKills
from asyncrl.control.record.events import load_events
from asyncrl.control.record.outcome import Outcome
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.states import RunState
from tests.control.supervisor.test_repair import Run

V2, V1 = "0::/pod\n", "4:memory:/pod\n0::/\n"
GROUP = "the kernel has just killed a process of its container for want of memory (oom_kill)"
WHOLE = "the kernel has just killed a process of this machine for want of memory (oom_kill)"

STOPPED = Outcome(state=RunState.STOPPED)


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "file", "said"),
    [
        (V2, "sys/fs/cgroup/pod/memory.events", GROUP),
        (V2, "sys/fs/cgroup/memory.events", GROUP),
        (V1, "sys/fs/cgroup/memory/pod/memory.oom_control", GROUP),
        (V1, "sys/fs/cgroup/memory/memory.oom_control", GROUP),
        ("", "proc/vmstat", WHOLE),
    ],
)
def test_a_count_that_rises_is_told_of_for_a_minute(
    tmp_path: Path, groups: str, file: str, said: str
) -> None:
    write(tmp_path, "proc/self/cgroup", groups)
    write(tmp_path, file, "low 0\noom_kill 3\n")
    kills = OomKills(tmp_path)
    kills.look(1.0)
    assert kills.recent(1.0) == "", "what was before says nothing"
    write(tmp_path, file, "low 0\noom_kill 4\n")
    kills.look(2.0)
    assert kills.recent(2.0) == kills.recent(2.0 + RECENT_S - 1.0) == said
    assert kills.recent(2.0 + RECENT_S) == ""


def test_a_machine_that_tells_no_count_is_no_hindrance(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "nonsense\n0::/\n")
    write(tmp_path, "proc/vmstat", "oom_kill many\n")
    kills = OomKills(tmp_path)
    kills.look(1.0)
    assert kills.recent(1.0) == ""


def test_a_service_that_died_as_the_count_rose_is_told_with_it(tmp_path: Path) -> None:
    write(tmp_path, "root/proc/vmstat", "oom_kill 0\n")
    run = Run(tmp_path)
    run.upkeep._kernel.oom_kills = OomKills(tmp_path / "root")
    run.begin()
    write(tmp_path, "root/proc/vmstat", "oom_kill 1\n")
    run.launcher.gone.add("learner.0")
    run.pulse()
    run.upkeep.stop(5.0, STOPPED)
    (told,) = [one["text"] for one in load_events(RunDir(tmp_path).events) if one["kind"] == "exit"]
    assert told == f"learner.0 gone: it was killed; {WHOLE}"
