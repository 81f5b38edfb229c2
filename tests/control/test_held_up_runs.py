"""A run that is held up says so in events, snapshot and health, and ends where nobody can go on."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from scripted_services import REPLACE

from asyncrl.cli.bulletin import Bulletin
from asyncrl.cli.views import LineView
from asyncrl.control.diagnosis import watch, watchdog
from asyncrl.control.diagnosis.lookout import Notices
from asyncrl.control.record.events import EventLog, load_events
from asyncrl.control.record.rundir import RunDir, read_json
from tests.control.supervisor.test_supervisor import make_supervisor, start
from tests.statuses import snapshot_of, statuses_of, told_by
from tests.threads import RUNTIME
from tests.waiting import wait_for

WAITING = {**REPLACE, "learner": "scripted_services:WaitingLearner"}


def test_a_run_whose_replicas_refuse_every_version_ends_with_the_reason(tmp_path: Path) -> None:
    replace = {**WAITING, "rollout": "scripted_services:RefusingReplica"}
    supervisor, _ = make_supervisor(tmp_path, steps=10**6, replace=replace)
    supervisor.run(threading.Event())
    outcome = read_json(RunDir(tmp_path).outcome)
    assert outcome is not None and (outcome["state"], outcome["service"]) == ("failed", "rollout.0")
    assert outcome["would_repeat"], "the next start would publish the same version"
    assert "the probe does not match" in outcome["error"] and "times in a row" in outcome["error"]
    found = [event for event in load_events(RunDir(tmp_path).events) if event["kind"] == "obstacle"]
    assert {event["service"] for event in found} == {"rollout.0", "rollout.1"}
    assert found[0]["cause"] == "weights_refused"
    assert found[0]["text"] == "vLLM refused the load of version 1: the probe does not match"


def test_a_run_whose_receivers_no_version_reaches_ends_with_the_reason(tmp_path: Path) -> None:
    unreached = {"weight_sync": "scripted_services:UnreachingSync", "rollout": "scripted_services:Syncing"}
    supervisor, _ = make_supervisor(tmp_path, steps=10**6, replace={**WAITING, **unreached})
    supervisor.run(threading.Event())
    outcome = read_json(RunDir(tmp_path).outcome)
    assert outcome is not None and (outcome["state"], outcome["service"]) == ("failed", "receiver.0")
    assert "no room for 4096 bytes in /dev/shm (60 times in a row)" in outcome["error"]
    assert not outcome["would_repeat"], "there may be room at the next start"
    found = [event for event in load_events(RunDir(tmp_path).events) if event["kind"] == "obstacle"]
    assert {event["service"] for event in found} == {"receiver.0", "receiver.1"}
    assert {event["cause"] for event in found} == {"weights_undelivered"}


def test_an_obstacle_is_in_the_snapshot_while_it_holds_and_its_end_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "AWAY_S", 0.5)
    replace = {**WAITING, "buffer": "scripted_services:AwayBuffer"}
    supervisor, _ = make_supervisor(tmp_path, steps=10**6, replace=replace)
    thread, stop = start(supervisor)
    wait_for(lambda: bool(told_by(supervisor)["obstacles"]))
    status = told_by(supervisor)
    (found,) = status["obstacles"]
    assert (found["service"], found["blocks"]) == ("buffer.0", True) and found["since"] > 0.0
    assert (
        status["bottleneck"]["why"] == found["reason"] == "Redis at localhost:1 is away: Connection refused"
    )
    assert status["health"] == "degraded"
    (tmp_path / "journal-back").touch()
    wait_for(lambda: len([e for e in load_events(RunDir(tmp_path).events) if e["kind"] == "obstacle"]) == 2)
    assert told_by(supervisor)["obstacles"] == [] and told_by(supervisor)["health"] == "ok"
    stop.set()
    thread.join(120.0)
    assert not thread.is_alive()


def test_a_stall_while_the_journal_is_away_blames_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "FIRST_STEP_S", 0.1)
    replace = {**WAITING, "buffer": "scripted_services:AwayBuffer"}
    supervisor, _ = make_supervisor(tmp_path, steps=10**6, replace=replace)
    thread, stop = start(supervisor)
    wait_for(lambda: any(one["kind"] == "stall" for one in load_events(RunDir(tmp_path).events)))
    stop.set()
    thread.join(120.0)
    stall = next(one for one in load_events(RunDir(tmp_path).events) if one["kind"] == "stall")
    assert stall["service"] == "buffer.0"
    assert stall["waiting"] == [
        "the run waits for buffer.0: Redis at localhost:1 is away: Connection refused"
    ]


def test_what_a_journal_lost_is_an_event_once_in_each_life(tmp_path: Path) -> None:
    replace = {**REPLACE, "buffer": "scripted_services:LosingBuffer"}
    supervisor, _ = make_supervisor(tmp_path, steps=9, replace=replace)
    supervisor.run(threading.Event())

    def told() -> list[str]:
        return [one["text"] for one in load_events(RunDir(tmp_path).events) if one["kind"] == "journal"]

    assert told() == ["Redis at localhost:1 lost acknowledged data"]
    statuses = statuses_of({"buffer.0": {"journal": {"kind": "redis", "losses": told()}}})
    events = EventLog(RunDir(tmp_path).events, RUNTIME)
    Notices(events).look(statuses)
    assert len(told()) == 1, "a supervisor that takes over finds it told"
    events.add("start", "run", "the run starts with 2 replicas")
    Notices(events).look(statuses)
    assert len(told()) == 2, "in another life it happened again"


def test_each_finding_of_the_guard_is_one_event_for_terminal_and_page(tmp_path: Path) -> None:
    replace = {**REPLACE, "learner": "scripted_services:WarnedLearner"}
    supervisor, _ = make_supervisor(tmp_path, steps=30, replace=replace)
    supervisor.run(threading.Event())
    found = [event for event in load_events(RunDir(tmp_path).events) if event["kind"] == "guard"]
    text = "the guard found, step {}: large_steps: actor/step_kl is 0.3"
    assert [event["text"] for event in found] == [text.format(0), text.format(1)]
    assert [(event["service"], event["finding"], event["step"]) for event in found] == [
        ("learner.0", "large_steps", 0),
        ("learner.0", "large_steps", 1),
    ]
    lines = Bulletin()
    assert lines.lines(snapshot_of(events=[])) == []
    assert lines.lines(snapshot_of(events=found))[0] == "! learner.0: " + text.format(0)


def test_why_a_service_is_started_again_is_in_the_snapshot_until_it_is_up(tmp_path: Path) -> None:
    replace = {**REPLACE, "rollout": "scripted_services:FailingReplica"}
    supervisor, _ = make_supervisor(tmp_path, steps=10**6, replace=replace)
    seen: list[str] = []
    thread, _ = start(supervisor)
    wait_for(lambda: bool(seen.extend(o["reason"] for o in told_by(supervisor)["obstacles"]) or seen))
    thread.join(120.0)
    assert not thread.is_alive()
    assert "no tokenizer in the model folder" in seen[0]
    outcome = read_json(RunDir(tmp_path).outcome)
    assert outcome is not None and outcome["would_repeat"], "it did so twice, and never worked"


@pytest.mark.parametrize(
    ("replica", "reason"),
    [
        ("FailingReplica", "no tokenizer in the model folder"),
        ("DyingEngine", "the engine died: ValueError: head_dim=16 is not supported"),
    ],
)
def test_why_a_replica_ended_is_an_event_and_a_line_of_the_terminal(
    tmp_path: Path, replica: str, reason: str
) -> None:
    replace = {**WAITING, "rollout": f"scripted_services:{replica}"}
    supervisor, _ = make_supervisor(tmp_path, steps=10**6, replace=replace)
    terminal = io.StringIO()
    view = LineView(terminal)
    thread, stop = start(supervisor)

    def is_told() -> bool:
        view.show(supervisor.snapshot())
        lines = terminal.getvalue().splitlines()
        return any(line.startswith("! rollout.") and reason in line for line in lines)

    wait_for(is_told)
    stop.set()
    thread.join(120.0)
    assert not thread.is_alive()
    exits = [event for event in load_events(RunDir(tmp_path).events) if event["kind"] == "exit"]
    assert exits[0]["service"].startswith("rollout.") and reason in exits[0]["text"]
