"""Ray's own 30 s are over on a busy machine: its start is tried once more, then the machine is named."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from asyncrl.control.ray.launcher import start_local
from asyncrl.core.errors import ServiceFailed

OVERRUN = (
    "The current node timed out during startup. This could happen because some of the raylet failed to "
    "startup or the GCS has become overloaded."
)

Started = list[subprocess.Popen[bytes]]


@pytest.fixture
def started() -> Iterator[Started]:
    """The processes of starts that were given up."""
    started: Started = []
    yield started
    for process in started:
        process.kill()
        process.wait(60.0)


def overrun(times: int, started: Started) -> Callable[..., Any]:
    """Stand in for Ray, which starts a process and gives up, so many times."""

    def init(**_: Any) -> Any:
        if len(started) == times:
            return SimpleNamespace(address_info={"gcs_address": "127.0.0.1:7"})
        started.append(subprocess.Popen(["sleep", "60"]))
        raise Exception(OVERRUN)

    return init


def test_a_start_that_overran_is_tried_once_more_after_its_processes_were_ended(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray, "init", overrun(1, started))
    assert start_local(tmp_path, 1, 0) == "127.0.0.1:7"
    assert len(started) == 1 and not psutil.pid_exists(started[0].pid)


def test_a_machine_on_which_both_tries_overran_is_named_with_its_load(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray, "init", overrun(2, started))
    monkeypatch.setattr(os, "getloadavg", lambda: (106.3, 90.0, 80.0))
    said = rf"too busy \(load 106 on {os.cpu_count()} cores\)\. Start the run again"
    with pytest.raises(ServiceFailed, match=said):
        start_local(tmp_path, 1, 0)
    assert len(started) == 2


def test_another_failure_of_ray_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[int] = []

    def init(**_: Any) -> Any:
        calls.append(1)
        raise ValueError("no such address")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match="no such address"):
        start_local(tmp_path, 1, 0)
    assert len(calls) == 1
