"""Rows of a learner that takes longer to answer than a pulse may wait."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from scripted_services import PacedLearner

from asyncrl.control.rows.recorder import training_rows
from asyncrl.control.rows.row_fetcher import RowFetcher
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.rpc.message import Message
from asyncrl.core.service_command import AnyCommand, HandOverRows, Rows
from tests.control.supervisor.test_repair import make_supervised, supervise_again
from tests.control.thread_launcher import ThreadLauncher
from tests.threads import RUNTIME
from tests.waiting import wait_for

ROWS = [{"training/global_step": step} for step in (1, 2, 3)]


class SlowLearner(ThreadLauncher):
    """Answers a question once it may; `asked` are those that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.may_answer = threading.Event()
        self.is_dead = False

    def command(self, name: str, command: Any, deadline_s: float) -> Any:
        assert name == "learner.0" and isinstance(command, HandOverRows)
        self.asked.append(command.after)
        assert self.may_answer.wait(60.0)
        if self.is_dead:
            raise ServiceFailed("learner.0 failed 'rows': it was killed")
        return handed(command.after)


def handed(first: int) -> Rows:
    """Return the rows from index `first` on."""
    return Rows(first, tuple(ROWS[first:]))


def test_a_late_answer_is_waited_on_for_and_not_asked_for_again() -> None:
    learner = SlowLearner()
    fetcher = RowFetcher(learner, RUNTIME)
    assert [fetcher.fetch(0, 0, 0.01) for _ in range(3)] == [None] * 3
    learner.may_answer.set()
    assert fetcher.fetch(0, 0, 10.0) == handed(0)
    assert learner.asked == [0]
    assert fetcher.fetch(0, 2, 10.0) == handed(2)
    assert learner.asked == [0, 2]


def test_what_an_earlier_life_of_the_learner_was_asked_is_forgotten() -> None:
    learner = SlowLearner()
    fetcher = RowFetcher(learner, RUNTIME)
    assert fetcher.fetch(0, 2, 0.01) is None
    learner.may_answer.set()
    assert fetcher.fetch(1, 0, 10.0) == handed(0)


def test_a_learner_that_died_over_the_question_is_asked_again() -> None:
    learner = SlowLearner()
    fetcher = RowFetcher(learner, RUNTIME)
    learner.may_answer.set()
    learner.is_dead = True
    assert fetcher.fetch(0, 0, 10.0) is None
    learner.is_dead = False
    assert fetcher.fetch(0, 0, 10.0) == handed(0)


def test_a_new_supervisor_records_nothing_before_the_learner_says_which_rows_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, launcher = make_supervised(tmp_path, "PacedLearner")
    first._begin()
    wait_for(lambda: launcher.service("learner.0").status().step == 5)
    first._observe()
    second = supervise_again(tmp_path, launcher)
    may_answer = threading.Event()
    command, fetch = PacedLearner.command, RowFetcher.fetch

    def be_late(self: PacedLearner, asked: AnyCommand) -> Message:
        assert may_answer.wait(60.0)
        return command(self, asked)

    def fetch_and_allow(self: RowFetcher, incarnation: int, after: int, wait_s: float) -> Any:
        found = fetch(self, incarnation, after, 10.0 if may_answer.is_set() else 0.01)
        may_answer.set()  # after the first look
        return found

    monkeypatch.setattr(PacedLearner, "command", be_late)
    monkeypatch.setattr(RowFetcher, "fetch", fetch_and_allow)
    second._begin()
    second._observe()
    second._observe()
    (tmp_path / "go-on").touch()
    second._watch(threading.Event())
    launcher.stop(launcher.started, 5.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in training_rows(lines)] == [1, 2, 3, 4, 5, 6, 7, 8]
