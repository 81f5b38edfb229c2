"""The queue in front of a sink: whatever the sink does, the run goes on, ends, and says what was lost."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path

import pytest
from scripted_services import REPLACE
from thread_launcher import ThreadLauncher

from asyncrl.control.record.sinks import outbox as module
from asyncrl.control.record.sinks.outbox import REOPEN_S, Outbox
from asyncrl.control.roster import Roster
from asyncrl.control.rows.recorder import Recorder, training_rows
from asyncrl.control.rows.row_files import load_rows
from asyncrl.control.supervisor import Supervisor
from asyncrl.core.config.tree import Config
from asyncrl.core.metrics import unknown_names
from asyncrl.page.http.prometheus import prometheus_text
from tests.runtimes import ManualClock
from tests.statuses import snapshot_of, told_by
from tests.threads import RUNTIME

WAIT_S = 60.0
WHERE = ("open", "write", "close")


class AwkwardSink:
    """Does what a test asks at one point exactly: hangs until `goes_on`, or raises."""

    name = "awkward"

    def __init__(self, hangs_in: str = "", raises_in: str = "", error: BaseException | None = None) -> None:
        self.hangs_in, self.raises_in = hangs_in, raises_in
        self.error = error or OSError("no route to host")
        self.is_there, self.goes_on = threading.Event(), threading.Event()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.calls: list[str] = []

    def _pass(self, point: str) -> None:
        self.calls.append(point)
        if point == self.hangs_in:
            self.is_there.set()
            self.goes_on.wait()
        if point == self.raises_in:
            raise self.error

    def open(self) -> None:
        self._pass("open")

    def write(self, values, step: int) -> None:
        self._pass("write")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self._pass("close")


def row(step: int) -> dict[str, object]:
    return {"training/global_step": step, "actor/lr": 0.5, "time": 3.0, "run": "a/b"}


def dropped(box: Outbox) -> float:
    return box.metrics()["metrics/sink_dropped/awkward"]


def test_rows_arrive_in_order_with_their_numbers_and_the_sink_is_closed():
    sink = AwkwardSink()
    box = Outbox(sink)
    for step in range(100):
        box.put(row(step), step)
    assert box.close(WAIT_S)
    assert sink.rows == [(step, {"training/global_step": step, "actor/lr": 0.5}) for step in range(100)]
    assert (sink.calls[0], sink.calls[-1]) == ("open", "close")
    assert box.metrics() == {"metrics/sink_dropped/awkward": 0.0, "metrics/sink_waiting/awkward": 0.0}


@pytest.mark.parametrize("where", ["open", "write"])
def test_a_sink_that_hangs_holds_nobody_up_and_what_it_did_not_take_is_counted(where: str, caplog):
    sink = AwkwardSink(hangs_in=where, raises_in=where)
    box = Outbox(sink, capacity=3)
    box.put(row(0), 0)
    assert sink.is_there.wait(WAIT_S)
    for step in range(1, 11):  # 3 find room, 7 do not
        box.put(row(step), step)
    assert dropped(box) == 7
    assert box.metrics()["metrics/sink_waiting/awkward"] == 4
    with caplog.at_level(logging.WARNING):
        assert not box.close(0.01)
    assert dropped(box) == 11
    assert box.metrics()["metrics/sink_waiting/awkward"] == 0
    sink.goes_on.set()
    assert box.close(WAIT_S)
    assert dropped(box) == 11, "a row is counted once"


def test_a_sink_that_hangs_at_its_end_is_left_behind():
    sink = AwkwardSink(hangs_in="close")
    box = Outbox(sink)
    box.put(row(0), 0)
    assert not box.close(0.01)
    assert sink.is_there.wait(WAIT_S)
    assert not box.close(0.01)
    assert sink.rows
    assert dropped(box) == 0
    sink.goes_on.set()
    assert box.close(WAIT_S)


@pytest.mark.parametrize(
    "error", [OSError("gone"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), MemoryError()]
)
def test_whatever_a_sink_raises_costs_its_rows_and_is_said_once(error: BaseException, caplog):
    sink = AwkwardSink(raises_in="write", error=error)
    box = Outbox(sink)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            box.put(row(step), step)
        assert box.close(WAIT_S)
    assert dropped(box) == 5
    assert sink.calls == ["open", *["write"] * 5, "close"]
    assert len(caplog.records) == 1
    assert type(error).__name__ in caplog.text


def test_a_sink_that_is_slow_loses_the_rows_that_find_no_room_and_keeps_the_others():
    sink = AwkwardSink(hangs_in="write")
    box = Outbox(sink, capacity=2)
    box.put(row(0), 0)
    assert sink.is_there.wait(WAIT_S)
    for step in (1, 2, 3):
        box.put(row(step), step)
    sink.goes_on.set()
    assert box.close(WAIT_S)
    assert [step for step, _ in sink.rows] == [0, 1, 2]
    assert dropped(box) == 1


def test_a_sink_that_cannot_be_opened_is_tried_again_after_a_while():
    sink, clock = AwkwardSink(raises_in="open"), ManualClock()
    box = Outbox(sink, clock=clock)

    def send(step: int) -> None:
        box.put(row(step), step)
        settled = threading.Event()
        while box.metrics()["metrics/sink_waiting/awkward"] and not settled.wait(0.001):
            pass

    send(0)
    send(1)
    assert sink.calls == ["open"], "not with every row"
    clock.advance(REOPEN_S)
    sink.raises_in = ""
    send(2)
    assert box.close(WAIT_S)
    assert [step for step, _ in sink.rows] == [2]
    assert dropped(box) == 2


def test_the_record_is_whole_and_ends_in_time_whatever_its_sinks_do(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("asyncrl.control.rows.recorder.CLOSE_S", 0.05)
    hanging = [AwkwardSink(hangs_in=where) for where in WHERE]
    raising = [AwkwardSink(raises_in=where) for where in WHERE]
    last_of_its_name = AwkwardSink(hangs_in="write")  # whose count is told: it can take no third row
    hanging.append(last_of_its_name)
    recorder = Recorder(
        tmp_path / "metrics.jsonl", RUNTIME, [Outbox(sink, 2) for sink in (*raising, *hanging)]
    )
    for step in range(20):
        last = recorder.record(row(step))
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["training/global_step"] for line in lines] == list(range(20))
    assert last["metrics/sink_dropped/awkward"] > 0
    assert lines[-1] == lines[-1] | last
    assert unknown_names(last) == {}
    for sink in hanging:
        sink.goes_on.set()


@pytest.mark.parametrize("fault", [{"hangs_in": "write"}, {"hangs_in": "close"}], ids=str)
def test_a_run_finishes_and_its_scrape_tells_of_the_sink_whatever_it_does(tmp_path, monkeypatch, fault):
    monkeypatch.setattr("asyncrl.control.rows.recorder.CLOSE_S", 0.05)
    sink = AwkwardSink(**fault)
    (tmp_path / "logs").mkdir()
    config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "gsm8k"}, learner={"steps": 3})
    roster = Roster(config, tmp_path, "abcd1234", tmp_path, "")
    recorder = Recorder(tmp_path / "metrics.jsonl", RUNTIME, [Outbox(sink)])
    supervisor = Supervisor(roster, ThreadLauncher(REPLACE), recorder, RUNTIME)
    supervisor.run(threading.Event())
    sink.goes_on.set()
    snapshot = told_by(supervisor)
    assert snapshot["state"] == "finished"
    assert len(training_rows(load_rows(tmp_path / "metrics.jsonl"))) == 3
    assert 'metrics_sink_waiting_sink{run="run",sink="awkward"}' in prometheus_text(
        snapshot_of({**snapshot, "run": "run"}), snapshot["metrics"]
    )


def test_the_thread_of_a_sink_does_not_keep_the_process_alive():
    sink = AwkwardSink(hangs_in="open")
    box = Outbox(sink)
    is_daemon = box._thread.daemon
    sink.goes_on.set()
    assert box.close(WAIT_S)
    assert is_daemon
    assert module.CAPACITY_ROWS < 10_000, "the queue is bounded"
