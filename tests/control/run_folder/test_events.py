"""The record of what happened to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.control.record.events import KEPT, EventLog, load_events
from tests.threads import RUNTIME


def test_an_event_is_a_line_with_its_time_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, RUNTIME).add("restart", "rollout.0", "it was killed", restarts=2)
    (line,) = path.read_text().splitlines()
    event = json.loads(line)
    assert event.pop("time") > 0
    assert event == {"kind": "restart", "service": "rollout.0", "text": "it was killed", "restarts": 2}


def test_the_newest_events_outlive_their_writer_and_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventLog(path, RUNTIME)
    for number in range(KEPT + 5):
        first.add("scale", "run", str(number))
    second = EventLog(path, RUNTIME)
    second.add("finish", "run", "done")
    assert [event["text"] for event in second.newest(2)] == [str(KEPT + 4), "done"]
    assert len(second.newest(10 * KEPT)) == KEPT
    assert second.newest(0) == []


def test_a_line_that_a_crash_tore_spoils_neither_the_next_nor_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, RUNTIME).add("start", "run", "a")
    with path.open("a") as file:
        file.write('{"kind": "res')
    EventLog(path, RUNTIME).add("finish", "run", "b")
    assert [event["text"] for event in load_events(path)] == ["a", "b"]


def test_an_event_that_cannot_be_written_is_counted_and_harms_nobody(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "no" / "events.jsonl", RUNTIME)
    events.add("start", "run", "a")
    assert events.num_lost == 1
    assert events.newest(1)[0]["text"] == "a"


def test_an_unknown_kind_is_a_programmers_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no event of kind"):
        EventLog(tmp_path / "e", RUNTIME).add("party", "run", "a")  # type: ignore[arg-type]
