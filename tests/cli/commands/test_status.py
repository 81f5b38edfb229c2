"""`asyncrl status` on live, starting and ended runs."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.reports import status
from asyncrl.cli.run.client import RunClient, find_run
from asyncrl.control.record.rundir import write_json
from asyncrl.control.snapshot import Snapshot, values_of
from tests.cli.commands.calling import asyncrl, head_of, live_run, make_folder
from tests.statuses import snapshot_of

SNAPSHOT = values_of(
    snapshot_of(
        {
            "run": "one",
            "state": "running",
            "health": "ok",
            "step": 12,
            "steps": 300,
            "paused": False,
            "metrics": {
                "critic/rewards/mean": 0.51234,
                "staleness/lag_mean": 1.25,
                "perf/learner_idle_share": 0.4,
            },
            "services": {"rollout.0": {"state": "READY", "version": 9}},
            "bottleneck": {"who": "rollout", "why": "generation is slower", "learner_waits_for": "rollout"},
            "ledger": {"issued": 200, "checkpoints": [4, 8]},
            "accuracy": 0.625,
            "error": None,
        }
    )
)
"""As its supervisor tells of it."""


def answering(**changes: Any) -> dict[str, Any]:
    return {"GET /status": lambda _: {**SNAPSHOT, **changes}}


def test_a_live_run_is_shown_with_its_bottleneck_and_why(tmp_path: Path) -> None:
    with live_run(tmp_path, "one", answering()):
        done = asyncrl("status", "--dir", tmp_path)
    assert done.code == 0
    assert "Bottleneck: the replicas. Generation is slower." in done.out and "step 12 of 300" in done.out
    assert done.err == "", "the page's token is for terminals only"


def test_json_is_the_snapshot_as_the_run_gave_it(tmp_path: Path) -> None:
    with live_run(tmp_path, "one", answering()):
        done = asyncrl("status", "--json", "--run", "one", "--dir", tmp_path)
    assert json.loads(done.out) == json.loads(json.dumps(SNAPSHOT))


def test_a_degraded_run_is_told_by_the_exit_code(tmp_path: Path) -> None:
    with live_run(tmp_path, "one", answering(health="degraded", paused=True)):
        done = asyncrl("status", "--dir", tmp_path)
        assert asyncrl("status", "--all", "--dir", tmp_path).code == 3
    assert done.code == 3
    assert "running, paused, degraded" in done.out


def test_a_run_whose_supervisor_does_not_answer_is_degraded(tmp_path: Path) -> None:
    with live_run(tmp_path, "one", {"GET /status": lambda _: {"state": "silent", "run": "one"}}):
        assert asyncrl("status", "--dir", tmp_path).code == 3


def test_several_runs_stand_side_by_side_and_ended_ones_too_if_asked_for(tmp_path: Path) -> None:
    ended = make_folder(tmp_path, "ended")
    write_json(ended.outcome, {"state": "failed", "error": "no"})
    write_json(ended.summary, {"steps": 7, "accuracy_end": 0.5})
    with live_run(tmp_path, "one", answering()), live_run(tmp_path, "two", answering(run="two", step=3)):
        both = asyncrl("status", "one", "two", "--dir", tmp_path)
        all_of_them = json.loads(asyncrl("status", "--all", "--json", "--dir", tmp_path).out)
        refused = asyncrl("status", "one", "ended", "--dir", tmp_path)
    head, *rows = [line.split() for line in both.out.splitlines()]
    assert head[:3] == ["run", "state", "step"] and head[-1] == "bottleneck"
    assert [row[:3] for row in rows] == [["one", "running", "12/300"], ["two", "running", "3/300"]]
    assert {one["run"]: one["state"] for one in all_of_them} == {
        "one": "running",
        "two": "running",
        "ended": "failed",
    }
    assert (
        refused.code == 4 and "the run failed: no." in refused.err and "To go on: asyncrl up" in refused.err
    )


def test_a_run_without_an_api_yet_says_what_it_does(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "one")
    write_json(folder.phase, {"state": "starting", "phase": "starting Ray"})
    with head_of(folder):
        found = json.loads(asyncrl("status", "--json", "--dir", tmp_path).out)
    assert (found["run"], found["state"], found["phase"]) == ("one", "starting", "starting Ray")


def test_a_folder_without_runs_is_told(tmp_path: Path) -> None:
    done = asyncrl("status", "--dir", tmp_path)
    assert (done.code, done.out) == (4, "") and "asyncrl up CONFIG" in done.err
    assert asyncrl("status", "--all", "--dir", tmp_path).out == "there are no runs\n"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_watching_shows_every_look_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.01)
    steps = itertools.count(1)

    def look(_: object) -> dict[str, Any]:
        step = next(steps)
        return {**SNAPSHOT, "step": step, "state": "running" if step < 4 else "finished"}

    with live_run(tmp_path, "one", {"GET /status": look}):
        done = asyncrl("status", "-w", *form, "--dir", tmp_path)
    lines = done.out.splitlines()
    assert done.code == 0
    if form:
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    else:
        assert lines[0] == "one: running" and lines[2].startswith("step 1/300")
        assert lines[-2:] == ["one: finished", "step 4/300  bottleneck \u2013"], (
            "what is new is told at the end"
        )


def test_watching_ends_when_the_run_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REFRESH_S", 0.01)
    with contextlib.ExitStack() as stack:
        folder = make_folder(tmp_path, "one")
        head = stack.enter_context(head_of(folder))
        looks = itertools.count()

        def sleep(seconds: float) -> None:
            if next(looks) == 2:
                head.kill()
                head.wait()

        clock = status.SystemClock()
        monkeypatch.setattr(clock, "sleep", sleep)
        asked = status.Asked(["one"], False, str(tmp_path))
        assert status.show_status(asked, as_json=True, is_watching=True, clock=clock) == 0
    assert next(looks) == 3


def test_the_newest_checkpoint_at_or_after_a_step_is_awaited() -> None:
    class Run:
        looks = itertools.count()

        def status(self) -> Snapshot:
            return snapshot_of(ledger={"checkpoints": [4, 8] if next(self.looks) < 2 else [8, 12]})

    clock = status.SystemClock()
    assert status.await_checkpoint(Run(), 9, 5.0, clock) == {"step": 12}  # type: ignore[arg-type]
    with pytest.raises(status.DeadlineExceeded, match="no checkpoint of step 13"):
        status.await_checkpoint(Run(), 13, 0.0, clock)  # type: ignore[arg-type]


def test_a_checkpoint_is_awaited_over_a_supervisor_that_is_started_again(tmp_path: Path) -> None:
    looks = itertools.count()

    def look(_: object) -> dict[str, Any]:
        return values_of(snapshot_of(ledger={"checkpoints": [4, 8][: next(looks)]}))

    with live_run(tmp_path, "one", {"GET /status": look}) as folder:
        client = find_run(str(tmp_path), "one")
        clock, down = status.SystemClock(), RunClient(folder, "http://127.0.0.1:9", "k", client.pid)
        assert status.await_checkpoint(client, 7, 30.0, clock) == {"step": 8}
        with pytest.raises(status.DeadlineExceeded, match="no checkpoint of step 7"):
            status.await_checkpoint(down, 7, 0.0, clock)
    with pytest.raises(status.NotRunning):
        status.await_checkpoint(down, 7, 0.0, clock)


def test_a_run_whose_head_was_killed_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    with live_run(tmp_path, "page", answering()) as folder:
        folder.metrics.write_text('{"time": 1, "training/global_step": 497}\n')
        (folder.checkpoints / "step-00000400").mkdir(parents=True)
    for words in (["page"], []):
        done = asyncrl("status", *words, "--dir", tmp_path)
        assert (done.code, done.out) == (4, "")
        assert "run 'page' was cut short at step 497: its head process" in done.err
        assert "To go on from the checkpoint of step 400: asyncrl up" in done.err


@pytest.mark.parametrize("words", [["--all"], ["--watch"], ["--json"], ["a", "b"]])
def test_a_line_for_each_service_is_of_one_run_and_printed_once(words: list[str], tmp_path: Path) -> None:
    done = asyncrl("status", "--services", *words, "--dir", tmp_path)
    assert done.code == 2 and "--services" in done.err


def test_all_runs_and_a_name_exclude_each_other(tmp_path: Path) -> None:
    done = asyncrl("status", "--all", "nope", "--dir", tmp_path)
    assert done.code == 2 and "leave out nope" in done.err
