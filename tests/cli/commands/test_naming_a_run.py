"""Every command that is about a run takes it as an argument or with `--run`, and says so if there is none."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from asyncrl.cli.app import app
from asyncrl.control.record.rundir import RunDir, write_json
from tests.cli.commands.calling import asyncrl, live_run, make_folder

VERBS = {
    "status": (),
    "logs": (),
    "down": (),
    "pause": (),
    "unpause": (),
    "checkpoint": (),
    "scale": ("rollout=1",),
    "drain": ("rollout.0",),
    "verify": (),
    "export": (),
    "eval": (),
    "replay": (),
    "inspect account": (),
    "inspect ticket": ("17",),
    "inspect rollouts": (),
    "inspect weights": (),
    "inspect trace": (),
}
"""Commands that are about a run, and what they need besides."""
TIMED = Path(__file__).parents[1] / "timed_process.py"
MAX_USER_S = 2.5
"""Of the processor, three times what the slowest takes."""
ABOUT_NO_RUN = ("up", "init", "plan", "doctor", "score", "data", "bench")


def commands(group: Any, prefix: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if name == "inspect":
            yield from commands(command, "inspect ")
        else:
            yield prefix + name


def test_the_table_of_this_test_has_every_command() -> None:
    found = set(commands(typer.main.get_command(app)))
    assert found == {*VERBS, *ABOUT_NO_RUN}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("form", ["argument", "option"])
def test_an_unknown_run_is_exit_code_4_and_one_sentence_that_names_those_there_are(
    tmp_path: Path, verb: str, form: str
) -> None:
    make_folder(tmp_path, "mine")
    named = ["nope", *VERBS[verb]] if form == "argument" else [*VERBS[verb], "--run", "nope"]
    done = asyncrl(*verb.split(), *named, "--dir", tmp_path)
    assert (done.code, done.out) == (4, "")
    assert done.err == f"asyncrl: there is no run 'nope' in {tmp_path}. There are: mine\n"


def test_an_answer_about_an_unknown_run_takes_no_framework_and_hardly_any_time(tmp_path: Path) -> None:
    """Processor time: the clock of a loaded machine says little."""
    make_folder(tmp_path, "mine")
    words = [[*verb.split(), *VERBS[verb], "--run", "nope", "--dir", str(tmp_path)] for verb in VERBS]
    lines = "".join(json.dumps(one) + "\n" for one in words)
    done = subprocess.run(
        [sys.executable, str(TIMED)], input=lines, capture_output=True, text=True, timeout=300, check=True
    )
    for verb, took in zip(VERBS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert (took["code"], took["heavy"]) == (4, []), f"{verb}: {done.stderr}"
        assert took["user_s"] < MAX_USER_S, verb


@pytest.mark.parametrize("verb", VERBS)
def test_a_folder_without_runs_is_exit_code_4_too(tmp_path: Path, verb: str) -> None:
    done = asyncrl(*verb.split(), *VERBS[verb], "--dir", tmp_path)
    assert (done.code, done.out) == (4, "") and f"there is no run in {tmp_path}" in done.err


@pytest.mark.parametrize("verb", ["status", "down", "pause", "checkpoint", "scale"])
def test_a_run_that_has_ended_is_told_with_how_it_ended(tmp_path: Path, verb: str) -> None:
    write_json(make_folder(tmp_path, "mine").outcome, {"state": "stopped", "error": ""})
    done = asyncrl(verb, "mine", *VERBS[verb], "--dir", tmp_path)
    assert done.code == 4 and "run 'mine' has ended: it was stopped. To go on: asyncrl up" in done.err


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "status"])
def test_two_runs_cannot_be_named(tmp_path: Path, verb: str) -> None:
    done = asyncrl(*verb.split(), "one", *VERBS[verb], "--run", "two", "--dir", tmp_path)
    assert done.code == 2 and "two runs are named: one, two" in done.err


@pytest.mark.parametrize("form", ["name", "folder", "option"])
def test_a_command_reaches_the_run_however_it_is_named(tmp_path: Path, form: str) -> None:
    asked: list[dict[str, Any]] = []

    def scale(body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body)
        return {"replicas": 3}

    with live_run(tmp_path, "one", {"POST /scale": scale}) as folder:
        words = {"name": ["one"], "folder": [str(folder.path)], "option": ["--run", "one"]}[form]
        assert asyncrl("scale", *words, "rollout=3", "--dir", tmp_path).code == 0
    assert asked == [{"replicas": 3}]


def test_a_word_of_logs_is_a_service_or_the_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder: RunDir = make_folder(tmp_path, name)
        folder.log("rollout.0").write_text(f"2026-11-23 18:00:00,000 of {name}\n")
        folder.log("learner.0").write_text("2026-11-23 18:00:00,000 a step\n")
    assert "of one" in asyncrl("logs", "one", "rollout", "--dir", tmp_path).out
    shown = asyncrl("logs", "rollout.0", "two", "--dir", tmp_path).out
    assert "of two" in shown and "a step" not in shown


@pytest.mark.parametrize("words", [[], ["inspect"], ["data"], ["bench"]])
def test_a_group_that_is_asked_for_nothing_shows_its_help(words: list[str]) -> None:
    done = asyncrl(*words)
    assert done.code == 0 and "Usage: asyncrl" in done.out


def test_what_nobody_foresaw_is_a_sentence_and_a_file_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("asyncrl.cli.doctor.examination.print_findings", broken)
    done = asyncrl("doctor")
    (written,) = tmp_path.glob("*.traceback")
    assert (done.code, done.out) == (1, "") and "Traceback" not in done.err
    assert (
        done.err
        == f"asyncrl: a defect of asyncrl: RecursionError: too deep\nPlease report it with {written}\n"
    )
    assert inspect.getsourcefile(broken) in written.read_text()


def test_a_folder_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").touch()
    done = asyncrl("plan", "quickstart", "--set", f"run.dir={tmp_path / 'resolved.yaml'}")
    assert done.code in (1, 2) and "Traceback" not in done.err
