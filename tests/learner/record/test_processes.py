"""The processes of a replay on several ranks: how their errors and their silence are heard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

import pytest

from asyncrl.core.errors import ConfigError, DataError, ServiceFailed
from learner.record import processes
from learner.record.comparison import ComparedStep, Difference
from learner.record.plan import Plan
from learner.record.rank import main as be_rank

Start = Callable[[str], tuple[subprocess.Popen[str], IO[str], IO[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process in place of a rank; returns it with its output and its errors."""
    started: list[subprocess.Popen[str]] = []
    files: list[IO[str]] = []

    def start(code: str) -> tuple[subprocess.Popen[str], IO[str], IO[str]]:
        output, errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes = {"stdin": subprocess.PIPE, "stdout": output, "stderr": errors}
        started.append(subprocess.Popen([sys.executable, "-Sc", code], **pipes, text=True))
        files.extend((output, errors))
        return started[-1], output, errors

    yield start
    processes._end(started)
    assert all(rank.returncode is not None for rank in started)
    for file in (*files, *(rank.stdin for rank in started)):
        file.close()


def await_all(*ranks: tuple[subprocess.Popen[str], IO[str], IO[str]], silence_s: float = 60.0) -> None:
    started, outputs, errors = zip(*ranks, strict=True)
    processes._await(started, outputs, errors, silence_s=silence_s)


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
    with pytest.raises(ServiceFailed, match=r"no rank of the replay has answered for 0\.3 s"):
        await_all(rank, silence_s=0.3)


def test_a_rank_says_what_its_error_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: Start
):
    plan = {**vars(Plan(tmp_path, 0, 0, 1, False)), "folder": str(tmp_path)}
    order = {"plan": plan, "overrides": [], "placement": {"rank": 1, "world_size": 2}}
    with pytest.raises(ConfigError) as caught:
        be_rank(json.dumps(order))
    _, output, _ = start("")
    output.write(capsys.readouterr().out)
    output.flush()
    found = processes._find_error(output)
    assert isinstance(found, ConfigError)
    assert (found.message, found.hint) == (caught.value.message, caught.value.hint)


def test_a_line_that_is_not_ours_or_half_written_is_taken_for_no_error_and_no_step(start: Start):
    said = ["{1: 2}", "[1]", '{"error": "Disk"}', '{"error": "annotations", "message": "", "hint": ""}']
    rank = start(
        f"print(*{said!r}, sep='\\n'); print('{{\"error\": \"Da', end='');"
        "raise SystemExit('the disk is full')"
    )
    with pytest.raises(ServiceFailed, match="rank 0 of the replay has failed: the disk is full"):
        await_all(rank)
    assert list(processes._find_steps(processes._Lines(rank[1]))) == []


def test_a_step_is_heard_when_its_line_is_whole_and_the_rank_writes_on_where_it_was(start: Start):
    step = ComparedStep(3, 95, 1, (Difference("actor/lr", 1e-4, None),), has_weights=True)
    line = json.dumps(asdict(step))
    rank = start(
        f"import sys; print({line[:20]!r}, end='', flush=True); sys.stdin.readline();"
        f"print({line[20:]!r}, flush=True);"
        f"sys.stdin.readline(); print({line!r})"
    )
    assert str(step) == "step 3: 1 of 95 metrics differs, weights equal"
    lines, heard = processes._Lines(rank[1]), []

    def hear_until(is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + 30.0
        while not is_done() and time.monotonic() < end:
            heard.extend(processes._find_steps(lines))
            time.sleep(0.01)

    hear_until(lambda: os.fstat(rank[1].fileno()).st_size == 20)
    assert list(processes._find_steps(lines)) == heard == []
    for num_steps in (1, 2):
        rank[0].stdin.write("\n")
        rank[0].stdin.flush()
        hear_until(lambda: len(heard) >= num_steps)  # noqa: B023
    assert heard == [step, step]


def test_the_steps_of_ranks_are_told_as_they_are_done_and_before_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_told, told = tmp_path / "told", []
    step = json.dumps(asdict(ComparedStep(3, 95, 0, (), has_weights=False)))
    code = (
        f"import os, time; print({step!r}, flush=True); end = time.monotonic() + 20.0\n"
        f"while not os.path.exists({str(is_told)!r}) and time.monotonic() < end: time.sleep(0.01)\n"
        f"print({step!r}); raise SystemExit('no memory' if time.monotonic() < end else 'nothing was told')"
    )

    def start(order: dict, rank: int, output: IO[str], errors: IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-Sc", code], stdout=output, stderr=errors, text=True)

    def say(said: str) -> None:
        told.append(said)
        if said.startswith("step 3"):
            is_told.touch()

    monkeypatch.setattr(processes, "_start", start)
    with pytest.raises(ServiceFailed, match="no memory"):
        processes.replay_on_ranks(Plan(tmp_path, 3, 3, 5, True), (), 1, say)
    assert told[1:] == ["step 3: 95 metrics equal, weights not recorded"] * 2
