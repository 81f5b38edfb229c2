"""A run whose folder's disk is full says so at once, where it can be read, and goes on when there is room."""

from __future__ import annotations

from pathlib import Path

from scripted_services import REPLACE

from asyncrl.cli.run.handle import RunHandle
from asyncrl.control.api import operations as api
from asyncrl.control.record.events import EventLog, load_events
from asyncrl.control.record.rundir import RunDir, read_json, write_json
from asyncrl.control.rows.recorder import Recorder, training_rows
from asyncrl.control.rows.row_files import load_rows
from tests.control.supervisor.test_supervisor import make_supervisor, start
from tests.small_disk import fill
from tests.statuses import told_by
from tests.threads import RUNTIME
from tests.waiting import wait_for

WAITING = "scripted_services:WaitingLearner"
PAGE_BYTES = 4096
"""Of a file system in memory: what fits into a file's last page needs no room."""


def obstacles_in(folder: Path) -> list[str]:
    """Return the obstacles among a run's events."""
    return [one["text"] for one in load_events(RunDir(folder).events) if one["kind"] == "obstacle"]


def test_a_full_disk_is_an_event_on_it_and_an_obstacle_until_there_is_room(small_disk: Path) -> None:
    replace = {**REPLACE, "learner": "scripted_services:PacedLearner"}
    supervisor, _ = make_supervisor(small_disk, steps=8, replace=replace)
    thread, _ = start(supervisor)
    wait_for(lambda: told_by(supervisor)["step"] == 5)
    fill(small_disk / "ballast")
    supervisor.operations.perform(api.Scale(3))  # what is decided is to be on disk
    wait_for(lambda: bool(told_by(supervisor)["obstacles"]))
    (found,) = told_by(supervisor)["obstacles"]
    assert (found["service"], found["cause"]) == ("supervisor.0", "disk_full")
    assert "No space left on device" in found["reason"] and str(small_disk) in found["reason"]
    wait_for(lambda: bool(obstacles_in(small_disk)))  # the status says it first
    assert obstacles_in(small_disk) == [found["reason"]]
    (small_disk / "ballast").unlink()
    wait_for(lambda: not told_by(supervisor)["obstacles"])
    (small_disk / "go-on").touch()
    thread.join(120.0)
    assert not thread.is_alive()
    outcome = read_json(RunDir(small_disk).outcome)
    assert outcome is not None and outcome["state"] == "finished"
    rows = training_rows(load_rows(RunDir(small_disk).metrics))
    assert [row["training/global_step"] for row in rows] == list(range(1, 9))
    assert not list(small_disk.glob("*.reserve"))


def test_a_row_that_the_disk_did_not_take_is_written_as_soon_as_there_is_room(small_disk: Path) -> None:
    """No other row has to come: the run may be paused."""
    supervisor, launcher = make_supervisor(small_disk, replace=REPLACE | {"learner": WAITING})
    supervisor._begin()
    fill(small_disk / "ballast")
    supervisor._rows._recorder.record({"training/global_step": 1, "a": "x" * 8192})
    supervisor._observe()
    assert told_by(supervisor)["obstacles"]
    (small_disk / "ballast").unlink()
    supervisor._observe()
    assert not told_by(supervisor)["obstacles"]
    (row,) = training_rows(load_rows(RunDir(small_disk).metrics))
    assert row["training/global_step"] == 1
    launcher.stop(launcher.started, 5.0)


def test_what_happens_to_a_run_on_a_full_disk_has_room_that_was_reserved(small_disk: Path) -> None:
    replace = {**REPLACE, "learner": WAITING}
    supervisor, _ = make_supervisor(small_disk, replace=replace)
    thread, stop = start(supervisor)
    try:
        wait_for(lambda: told_by(supervisor)["state"] == "running")
        end_page(RunDir(small_disk).events)
        fill(small_disk / "ballast")
        supervisor.operations.perform(api.Scale(3))
        kinds = [one["kind"] for one in load_events(RunDir(small_disk).events)]
    finally:
        (small_disk / "ballast").unlink()
        stop.set()
        thread.join(120.0)
    assert not thread.is_alive() and "scale" in kinds


def end_page(path: Path) -> None:
    """Let the file end where a page does: what comes next needs room on the disk."""
    with path.open("ab") as file:
        file.write(b" " * (-(file.tell() + 1) % PAGE_BYTES) + b"\n")


def test_rows_that_a_full_disk_did_not_take_are_written_whole_once_there_is_room(small_disk: Path) -> None:
    path = small_disk / "metrics.jsonl"
    recorder, (first, *others) = Recorder(path, RUNTIME), range(1, 5)
    recorder.record({"training/global_step": first, "a": "x" * 100})
    fill(small_disk / "ballast")
    for step in others:
        recorder.record({"training/global_step": step, "a": "x" * 3000})
    assert "No space left" in recorder.write_error
    assert [row["training/global_step"] for row in load_rows(path)] == [1, 2], "what fits is there, and whole"
    (small_disk / "ballast").unlink()
    recorder.close()
    assert recorder.write_error == ""
    assert [row["training/global_step"] for row in load_rows(path)] == [1, 2, 3, 4]


def test_an_event_on_a_full_disk_takes_the_room_that_was_reserved_for_it(small_disk: Path) -> None:
    path = small_disk / "events.jsonl"
    events, unreserved = (
        EventLog(path, RUNTIME, reserve_bytes=16384),
        EventLog(small_disk / "others.jsonl", RUNTIME),
    )
    fill(small_disk / "ballast")
    unreserved.add("stall", "buffer.0", "no room for this one")
    events.add("obstacle", "buffer.0", "the disk is full")
    assert [one["text"] for one in load_events(path)] == ["the disk is full"]
    assert (events.num_lost, unreserved.num_lost) == (0, 1)


def test_room_is_reserved_again_once_there_is_some(small_disk: Path) -> None:
    path, ballast = small_disk / "events.jsonl", small_disk / "ballast"
    events = EventLog(path, RUNTIME, reserve_bytes=16384)
    for number in range(2):
        end_page(path)
        fill(ballast)
        events.add("obstacle", "buffer.0", f"the disk is full, {number}")
        ballast.unlink()
        events.add("obstacle", "buffer.0", f"there is room, {number}")
    assert [one["text"] for one in load_events(path)] == [
        *("the disk is full, 0", "there is room, 0"),
        *("the disk is full, 1", "there is room, 1"),
    ]
    assert events.num_lost == 0
    end_page(path)
    fill(ballast)
    for _ in range(2):
        events.add("obstacle", "buffer.0", "still full")
    assert not list(small_disk.glob("*.reserve")), "a disk without room for all of it keeps what it has"


def test_events_that_could_not_be_written_are_written_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path, RUNTIME)
    path.symlink_to("/dev/full")  # from here on: what it reads never ends
    events.add("stall", "buffer.0", "first")
    assert events.num_lost == 1
    path.unlink()
    events.add("stall", "buffer.0", "second")
    assert [one["text"] for one in load_events(path)] == ["first", "second"]


def test_a_head_that_died_without_a_word_on_a_full_disk_is_told_of_as_such(small_disk: Path) -> None:
    write_json(RunDir(small_disk).live, {})
    handle = RunHandle(RunDir(small_disk), pid=1, run_id="x", sockets=small_disk)
    assert handle.result().error == "the head process died"
    fill(small_disk / "ballast")
    assert f"the disk of {small_disk} is full (" in handle.result().error


def test_how_a_run_ended_on_a_full_disk_is_recorded_in_room_that_was_reserved(small_disk: Path) -> None:
    replace = {**REPLACE, "learner": WAITING}
    supervisor, _ = make_supervisor(small_disk, steps=8, replace=replace)
    thread, _ = start(supervisor)
    wait_for(lambda: told_by(supervisor)["state"] == "running")
    fill(small_disk / "ballast")
    supervisor.operations.perform(api.Scale(3))
    wait_for(lambda: bool(told_by(supervisor)["obstacles"]))
    fill(small_disk / "more ballast")  # where events were told
    supervisor.operations.perform(api.Stop())
    thread.join(120.0)
    assert not thread.is_alive()
    outcome = read_json(RunDir(small_disk).outcome)
    assert outcome is not None and outcome["state"] == "stopped"


def test_what_nobody_could_write_down_is_told_by_the_terminal_that_heard_it(tmp_path: Path) -> None:
    write_json(RunDir(tmp_path).live, {})
    handle = RunHandle(
        RunDir(tmp_path), pid=1, run_id="x", sockets=tmp_path, last_error="learner.0 failed: nan"
    )
    assert (handle.result().service, handle.result().error) == ("learner.0", "learner.0 failed: nan")
