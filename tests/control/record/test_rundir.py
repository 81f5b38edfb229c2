"""The files of a run, as whoever tells of it reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.control.record.rundir import STATE_DUMP, RunDir, write_json


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path)
    folder.logs.mkdir()
    folder.log("head.0").write_text("too many open files\n" * 3)
    return folder


def test_a_run_of_an_older_asyncrl_keeps_its_submitted_configuration(folder: RunDir) -> None:
    assert folder.config.name == "config.yaml"
    (folder.path / "asked.yaml").write_text("")
    assert folder.config.name == "asked.yaml"


def test_the_tail_of_a_log_is_of_this_life_of_the_run(folder: RunDir) -> None:
    write_json(folder.live, {"run_id": "a", "log_sizes": folder.log_sizes()})
    assert folder.tail("head.0") == []
    with folder.log("head.0").open("a") as file:
        file.write("this life's\n")
    assert folder.tail("head.0") == ["this life's"]
    folder.log("head.0").write_text("anew\n")
    assert folder.tail("head.0") == ["anew"], "a log that somebody cut is read from its beginning"


def test_the_tail_of_a_log_leaves_out_what_hides_the_last_words(folder: RunDir) -> None:
    dump = "".join(f"[2026-11-24] {STATE_DUMP} line {number}\n" for number in range(99))
    folder.log("head.0").write_text(f"the last words\n{dump}")
    assert folder.tail("head.0") == ["the last words"]
