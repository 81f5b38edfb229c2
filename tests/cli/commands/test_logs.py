"""`asyncrl logs`: several services' logs as one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from asyncrl.cli.reports.logs import BLOCK_BYTES, LogFile, Logs, Record, Writer, print_logs
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.runtime.clock import SystemClock
from tests.cli.commands.calling import asyncrl, head_of, make_folder


def at(second: int, text: str) -> str:
    return f"2026-11-21 20:43:{second:02},854 INFO {text}\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = make_folder(tmp_path, "one")
    folder.log("buffer.0").write_text(at(1, "b1") + at(4, "b4"))
    folder.log("rollout.0").write_text("no time yet\n" + at(2, "r2") + "Traceback\n  boom\n" + at(5, "r5"))
    folder.log("rollout.1").write_text(at(3, "q3"))
    return folder


def texts(out: str) -> list[str]:
    return [line.partition("| ")[2].split(" INFO ")[-1] for line in out.splitlines()]


def test_logs_are_merged_by_time_and_a_record_stays_whole(run: RunDir) -> None:
    done = asyncrl("logs", "--dir", run.path.parent)
    assert texts(done.out) == ["no time yet", "b1", "r2", "Traceback", "  boom", "q3", "b4", "r5"]
    assert done.out.splitlines()[1].startswith("buffer.0      | 2026-11-21 20:43:01")
    assert "\x1b" not in done.out, "colours are for terminals"
    assert done.code == 0 and done.err == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-n", "3"], ["q3", "b4", "r5"]),
        (["-n", "5"], ["Traceback", "  boom", "q3", "b4", "r5"][-5:]),
        (["-n", "0"], []),
        (["rollout"], ["no time yet", "r2", "Traceback", "  boom", "q3", "r5"]),
        (["rollout.1", "buffer.0"], ["b1", "q3", "b4"]),
    ],
)
def test_lines_and_services_can_be_chosen(run: RunDir, words: list[str], expected: list[str]) -> None:
    assert texts(asyncrl("logs", *words, "--run", "one", "--dir", run.path.parent).out) == expected


def test_json_is_a_line_per_line(run: RunDir) -> None:
    lines = [
        json.loads(line) for line in asyncrl("logs", "--json", "--dir", run.path.parent).out.splitlines()
    ]
    assert lines[3] == {"time": "2026-11-21 20:43:02,854", "service": "rollout.0", "line": "Traceback"}


def test_a_service_that_is_not_there_is_refused_with_those_that_are(run: RunDir) -> None:
    done = asyncrl("logs", "learner", "--dir", run.path.parent)
    assert (done.code, done.out) == (2, "")
    assert "There are: buffer.0, rollout.0, rollout.1" in done.err
    assert asyncrl("logs", "--dir", run.path / "nothing").code == 4


def test_services_have_colours_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Writer(as_json=False, has_colors=True).write([Record("t", "a.0", ("x",)), Record("t", "b.0", ("y",))])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("\x1b[") and first.endswith("\x1b[0m x") and first[:5] != second[:5]


def test_a_long_log_is_read_from_its_end_only(tmp_path: Path) -> None:
    path = tmp_path / "buffer.0.log"
    path.write_text("".join(at(number % 60, f"line {number} " + "é" * 99) for number in range(3000)))
    assert path.stat().st_size > 5 * BLOCK_BYTES
    for num_lines in (1, 600, 2999, 3000, 9999):
        found = [line for record in LogFile(path).tail(num_lines) for line in record.lines]
        assert len(found) == min(num_lines, 3000)
        assert f"line {3000 - len(found)} " in found[0] and "line 2999 " in found[-1]


def test_what_is_written_later_is_read_once_and_only_when_its_line_is_whole(run: RunDir) -> None:
    logs = Logs(run, ["buffer.0", "learner.0"]) if run.log("learner.0").touch() is None else None
    assert logs is not None
    logs.tail(10)
    assert logs.read_new() == []
    with run.log("buffer.0").open("a") as file:
        file.write(at(9, "b9") + "2026-11-21 20:4")
        file.flush()
        assert [record.lines for record in logs.read_new()] == [(at(9, "b9")[:-1],)]
        file.write("3:10,000 b10\n")
        file.flush()
        (record,) = logs.read_new()
        assert record.lines == ("2026-11-21 20:43:10,000 b10",)
    run.log("learner.0").write_text(at(11, "new"))
    assert [record.service for record in logs.read_new()] == ["learner.0"]
    run.log("buffer.0").write_text(at(12, "anew"))
    assert [record.lines for record in logs.read_new()] == [(at(12, "anew")[:-1],)], "a shorter file is new"


def test_following_ends_with_the_run_and_shows_its_last_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    with head_of(run) as head:

        class Clock(SystemClock):
            def sleep(self, seconds: float) -> None:
                run.log("rollout.2").write_text(at(20, "the last words"))
                head.kill()
                head.wait()

        print_logs(run.path, [], 1, is_following=True, clock=Clock())
    assert texts(out.getvalue()) == ["r5", "the last words"]


def test_lines_of_one_service_keep_their_order_where_its_clock_was_set_back(run: RunDir) -> None:
    run.log("buffer.0").write_text(at(8, "first") + at(1, "second") + at(9, "third"))
    found = texts(asyncrl("logs", "--dir", run.path.parent).out)
    assert [text for text in found if text in ("first", "second", "third")] == ["first", "second", "third"]
    assert found.index("second") > found.index("r5"), "it is shown no earlier than what came before it"
