"""The processes of a replay on several ranks: how their errors and their silence are heard."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from asyncrl.errors import ConfigError, DataError, ServiceFailed
from learner.record import processes
from learner.record.plan import Plan

Start = Callable[[str], tuple[subprocess.Popen[str], IO[str], IO[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process in place of a rank; returns it with its output and its errors."""
    started: list[subprocess.Popen[str]] = []
    files: list[IO[str]] = []

    def start(code: str) -> tuple[subprocess.Popen[str], IO[str], IO[str]]:
        output, errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        started.append(
            subprocess.Popen([sys.executable, "-Sc", code], stdout=output, stderr=errors, text=True)
        )
        files.extend((output, errors))
        return started[-1], output, errors

    yield start
    processes._end(started)
    assert all(rank.returncode is not None for rank in started)
    for file in files:
        file.close()


def await_all(*ranks: tuple[subprocess.Popen[str], IO[str], IO[str]], silence_s: float = 60.0) -> None:
    started, outputs, errors = zip(*ranks, strict=True)
    processes._await(started, outputs, errors, silence_s)


def test_the_error_that_has_a_name_is_raised_and_not_that_of_the_rank_that_misses_its_peer(start: Start):
    said = json.dumps({"error": "DataError", "message": "no step 5", "hint": "look"})
    ranks = start("raise SystemExit('connection closed by peer')"), start(f"print('{said}'); exit(1)")
    for rank, _, _ in ranks:
        rank.wait(30.0)
    with pytest.raises(DataError, match=r"^no step 5\. look$"):
        await_all(*ranks)
    with pytest.raises(ServiceFailed, match="rank 0 of the replay has failed: connection closed by peer"):
        await_all(ranks[0])


def test_ranks_that_say_nothing_are_not_waited_for(start: Start):
    rank = start("import time; time.sleep(100)")
    with pytest.raises(ServiceFailed, match=r"no rank of the replay has said anything for 0\.3 s"):
        await_all(rank, silence_s=0.3)


def test_a_rank_says_what_its_error_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: Start
):
    plan = {**vars(Plan(tmp_path, 0, 0, 1, False)), "folder": str(tmp_path)}
    order = {"plan": plan, "overrides": [], "placement": {"rank": 1, "world_size": 2}}
    with pytest.raises(ConfigError) as caught:
        processes.main(json.dumps(order))
    _, output, _ = start("")
    output.write(capsys.readouterr().out)
    found = processes._find_error(output)
    assert isinstance(found, ConfigError)
    assert (found.message, found.hint) == (caught.value.message, caught.value.hint)
