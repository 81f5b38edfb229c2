"""The path of a command from the command line to the actor's method: modules on the stacks of its threads."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from scripted_services import REPLACE, Scripted
from thread_launcher import ThreadLauncher

from asyncrl.cli.run import client
from asyncrl.control.api.server import ControlApi
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.roster import Roster
from asyncrl.control.rows.recorder import Recorder
from asyncrl.control.supervisor import Supervisor
from asyncrl.core.service_command import AnyCommand, Drain
from tests.cli.commands.calling import KEY, asyncrl, head_of
from tests.control.supervisor.test_supervisor import make_config, start
from tests.threads import RUNTIME
from tests.waiting import wait_for

OURS = ("asyncrl.", "thread_launcher", "scripted_services", __name__)
"""Prefixes of modules that count; the second stands for `control.ray.launcher`, the last two for the host."""
MAX_CALLS = 7


def modules_on_stack() -> list[str]:
    """Return the modules that this call came through, the first caller first, neighbours once."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        found.append(frame.f_globals["__name__"])
        frame = frame.f_back
    return [name for name, _ in groupby(name for name in reversed(found) if name.startswith(OURS))]


class TracedReplica(Scripted):
    """Notes through which modules it is told to drain."""

    path: list[str] = []

    def command(self, command: AnyCommand) -> Any:
        if isinstance(command, Drain):
            TracedReplica.path = modules_on_stack()
        return super().command(command)


def test_drain_takes_at_most_seven_calls_from_module_to_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunDir(tmp_path / "one")
    folder.logs.mkdir(parents=True)
    launcher = ThreadLauncher({**REPLACE, "rollout": f"{__name__}:TracedReplica"})
    roster = Roster(make_config(10**6), folder.path, "abcd1234", folder.path, "")
    supervisor = Supervisor(roster, launcher, Recorder(folder.metrics, RUNTIME), RUNTIME)
    thread, stop = start(supervisor)
    asked: list[list[str]] = []
    opened = client.DIRECT.open

    def open_and_note(*args: Any, **values: Any) -> Any:
        asked.append([name for name in modules_on_stack() if name != __name__])
        return opened(*args, **values)

    monkeypatch.setattr(client.DIRECT, "open", open_and_note)
    api = ControlApi(0, KEY, supervisor.operations.routes())
    try:
        wait_for(lambda: supervisor.lifecycle.state == "running" and 1 in supervisor.fleet.replicas)
        with head_of(folder, api.url):
            done = asyncrl("drain", "rollout.1", "--dir", tmp_path)
        assert done.code == 0 and "rollout.1 drains" in done.err
    finally:
        stop.set()
        thread.join(120.0)
        api.close()
    (command,) = asked
    path = [*command[command.index("asyncrl.cli.commands.operating") :], *TracedReplica.path]
    assert path == [
        "asyncrl.cli.commands.operating",
        "asyncrl.cli.run.client",
        "asyncrl.control.api.server",
        "asyncrl.control.operations",
        "asyncrl.control.reconciler.reconciler",
        "asyncrl.control.reconciler.actuator",
        "thread_launcher",
        __name__,
    ]
    assert len(path) - 1 <= MAX_CALLS
