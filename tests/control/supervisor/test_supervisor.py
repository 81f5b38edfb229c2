"""The supervisor, with scripted services in threads."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from scripted_services import REPLACE, ROW
from thread_launcher import ThreadLauncher

from asyncrl.control.api import operations
from asyncrl.control.api.server import ControlApi, Text
from asyncrl.control.fleet.autoscaler import Autoscaler, Decision, Pacing
from asyncrl.control.record.history import read_history
from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.control.record.summary import NAMES, summarise
from asyncrl.control.roster import Roster
from asyncrl.control.rows.metering import Meter
from asyncrl.control.rows.recorder import Recorder
from asyncrl.control.rows.row_files import load_rows
from asyncrl.control.supervisor import PULSE_S, Supervisor
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, Refused
from asyncrl.core.metrics.row_log import paths_of
from asyncrl.core.metrics.run_names import FIRST_AFTER_START
from asyncrl.core.service_command import Drain
from asyncrl.core.status.statuses import Statuses
from asyncrl.page.http.routes import page_routes
from tests.statuses import statuses_of, told_by
from tests.threads import RUNTIME
from tests.waiting import wait_for


def make_config(steps: int, start_deadline_s: float = 300.0) -> Config:
    return Config(
        model={"path": "m"},
        data={"train": "t"},
        reward={"fn": "gsm8k"},
        rollout={"replicas": 2},
        learner={"steps": steps},
        launcher={"start_deadline_s": start_deadline_s},
    )


def make_supervisor(
    folder: Path, steps: int = 3, replace: dict[str, str] = REPLACE, start_deadline_s: float = 300.0
) -> tuple[Supervisor, ThreadLauncher]:
    launcher = ThreadLauncher(replace)
    (folder / "logs").mkdir()
    roster = Roster(make_config(steps, start_deadline_s), folder, "abcd1234", folder, "")
    return Supervisor(roster, launcher, Recorder(folder / "metrics.jsonl", RUNTIME), RUNTIME), launcher


def start(supervisor: Supervisor) -> tuple[threading.Thread, threading.Event]:
    stop = threading.Event()
    thread = threading.Thread(target=supervisor.run, args=(stop,))
    thread.start()
    return thread, stop


def test_a_run_ends_finished_when_the_learner_has_done_its_steps(tmp_path: Path) -> None:
    supervisor, launcher = make_supervisor(tmp_path)
    supervisor.run(threading.Event())
    outcome, summary = read_json(RunDir(tmp_path).outcome), read_json(RunDir(tmp_path).summary)
    assert outcome is not None and outcome["state"] == "finished"
    assert summary is not None and summary["steps"] == 3
    assert (summary["accuracy_start"], summary["ledger_residue"], summary["masked_share"]) == (0.25, 0, 0.1)
    assert summary["ledger"]["trained"] == 6, "the account is taken after the last event"
    assert (tmp_path / "curves.png").exists()
    assert sorted(supervisor.weights().replicas) == ["rollout.0", "rollout.1"]
    assert sorted(launcher.killed) == sorted(
        [
            "buffer.0",
            "weight_sync.0",
            "publisher.0",
            "learner.0",
            "rollout.0",
            "rollout.1",
            "receiver.0",
            "receiver.1",
        ]
    )


def test_the_newest_evaluation_is_scraped_also_where_a_supervisor_found_it_on_record(tmp_path: Path) -> None:
    supervisor, _ = make_supervisor(tmp_path)
    assert told_by(supervisor)["evaluation"] == {} and told_by(supervisor)["accuracy"] is None
    supervisor.run(threading.Event())
    roster = Roster(make_config(3), tmp_path, "abcd1234", tmp_path, "")
    successor = Supervisor(
        roster,
        ThreadLauncher(REPLACE),
        Recorder(tmp_path / "metrics.jsonl", RUNTIME),
        RUNTIME,
    )
    for one in (supervisor, successor):
        answer = page_routes(one.snapshot, make_config(3), tmp_path)["GET /metrics"]({})
        assert isinstance(answer, Text)
        (line,) = (line for line in answer.body.decode().splitlines() if 'source="held_out"' in line)
        assert line.startswith("asyncrl_val_core_source_variable_metric{") and line.endswith("} 0.25")
        assert told_by(one)["accuracy"] == 0.25


def test_a_failed_run_says_why_while_it_is_being_ended(tmp_path: Path) -> None:
    replace = {**REPLACE, "rollout": "scripted_services:FailingReplica"}
    supervisor, launcher = make_supervisor(tmp_path, steps=10**6, replace=replace)
    told: list[tuple[str, str]] = []
    kill = launcher.kill

    def kill_and_look(name: str) -> None:
        status = told_by(supervisor)
        told.append((status["state"], status["error"] or ""))
        kill(name)

    launcher.kill = kill_and_look  # type: ignore[method-assign]
    supervisor.run(threading.Event())
    state, error = told[-1]
    assert state == "stopping" and "no tokenizer in the model folder" in error


class EagerAutoscaler(Autoscaler):
    """Decides on every few steps, and counts its decisions."""

    num_decisions = 0

    def __init__(self, minimum: int, maximum: int, max_lag: int) -> None:
        super().__init__(minimum, maximum, max_lag, Pacing(settle_s=0.0, window_s=0.0, min_steps=3))

    def decide(
        self, now: float, wanted: int, ready: int, rows: Iterable[Mapping[str, object]]
    ) -> Decision | None:
        decision = super().decide(now, wanted, ready, rows)
        EagerAutoscaler.num_decisions += decision is not None
        return decision


def make_autoscaled(folder: Path, monkeypatch: pytest.MonkeyPatch, num_cpus: int) -> Supervisor:
    """Return the supervisor of one to eight replicas that take a processor each."""
    monkeypatch.setattr("asyncrl.control.fleet.autoscaler.Autoscaler", EagerAutoscaler)
    monkeypatch.setattr(EagerAutoscaler, "num_decisions", 0)
    monkeypatch.setattr("os.cpu_count", lambda: num_cpus)
    (folder / "logs").mkdir()
    rollout = {"replicas": {"min": 1, "max": 8}, "cpus": 1.0}
    config = make_config(10**6).model_dump(mode="json") | {"rollout": rollout}
    roster = Roster(Config.model_validate(config), folder, "abcd1234", folder, "")
    recorder = Recorder(folder / "metrics.jsonl", RUNTIME)
    return Supervisor(roster, ThreadLauncher(REPLACE), recorder, RUNTIME)


def test_the_autoscaler_starts_what_there_is_room_for_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make_autoscaled(tmp_path, monkeypatch, num_cpus=64)
    thread, stop = start(supervisor)
    wait_for(lambda: "rollout.1" in told_by(supervisor)["services"])
    status = told_by(supervisor)
    stop.set()
    thread.join(120.0)
    assert not thread.is_alive()
    texts = [event["text"] for event in status["events"] if event["kind"] == "autoscale"]
    assert texts and "not scaled" not in texts[0]


def test_the_autoscaler_is_refused_what_an_operator_would_be_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make_autoscaled(tmp_path, monkeypatch, num_cpus=2)
    thread, stop = start(supervisor)
    wait_for(lambda: EagerAutoscaler.num_decisions >= 3)
    status = told_by(supervisor)
    stop.set()
    thread.join(120.0)
    assert not thread.is_alive()
    found = [event["text"] for event in status["events"] if event["kind"] == "autoscale"]
    assert len(found) == 1 and "not scaled to" in found[0] and "this machine has 2" in found[0]
    assert [name for name in status["services"] if name.startswith("rollout.")] == ["rollout.0"]


def test_a_run_ends_only_after_its_last_evaluation(tmp_path: Path) -> None:
    replace = {**REPLACE, "buffer": "scripted_services:LateEvaluation"}
    supervisor, _ = make_supervisor(tmp_path, replace=replace)
    supervisor.run(threading.Event())
    summary = read_json(RunDir(tmp_path).summary)
    assert summary is not None and summary["accuracy_end"] == 0.25


def test_an_evaluation_that_never_ends_does_not_hold_up_the_end_of_a_run_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncrl.control.supervisor.EVALUATION_WAIT_S", 0.0)
    replace = {**REPLACE, "buffer": "scripted_services:LateEvaluation"}
    supervisor, _ = make_supervisor(tmp_path, replace=replace)
    supervisor.run(threading.Event())
    assert supervisor.lifecycle.state == "finished"
    assert "an evaluation was still open after 0 s" in caplog.text


def test_a_supervisor_takes_no_command_of_a_host(tmp_path: Path) -> None:
    supervisor, _ = make_supervisor(tmp_path)
    with pytest.raises(ConfigError, match="the supervisor knows no command 'drain'"):
        supervisor.command(Drain())


def test_a_log_of_rows_that_cannot_be_read_costs_its_rows_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, _ = make_supervisor(tmp_path)
    for path in paths_of(tmp_path):
        path.symlink_to(path)
    supervisor.run(threading.Event())
    assert supervisor.lifecycle.state == "finished"
    assert "the learner's own log of its rows cannot be read" in caplog.text


def test_an_evaluation_that_is_on_record_is_not_recorded_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"training/global_step": 0, "val/id": 1, "val-core/held_out/acc/mean@1": 0.125}) + "\n"
    )
    supervisor, _ = make_supervisor(tmp_path)
    supervisor.run(threading.Event())
    summary = read_json(RunDir(tmp_path).summary)
    assert summary is not None and summary["accuracy_start"] == 0.125


def test_a_service_that_fails_ends_the_run_with_its_own_error_and_log(tmp_path: Path) -> None:
    supervisor, launcher = make_supervisor(
        tmp_path, steps=10**6, replace={**REPLACE, "rollout": "scripted_services:FailingReplica"}
    )
    (tmp_path / "logs" / "rollout.0.log").write_text("\n".join(f"line {n}" for n in range(30)))
    supervisor.run(threading.Event())
    outcome = read_json(RunDir(tmp_path).outcome)
    assert outcome is not None
    assert outcome["state"] == "failed" and outcome["service"] in ("rollout.0", "rollout.1")
    assert "no tokenizer in the model folder" in outcome["error"]
    if outcome["service"] == "rollout.0":
        assert outcome["tail"][-1] == "line 29" and len(outcome["tail"]) == 20
    assert "learner.0" in launcher.killed


def test_an_open_page_sees_how_the_run_ended_before_the_head_ends_it(tmp_path: Path) -> None:
    supervisor, _ = make_supervisor(tmp_path, steps=10**6)
    api = ControlApi(0, "key", page_routes(supervisor.snapshot, make_config(3), tmp_path))
    was_read = threading.Event()
    found: list[tuple[str, bool]] = []

    def see_off() -> None:
        api.await_readers(5.0)
        found.append((told_by(supervisor)["state"], was_read.wait(1.0)))

    supervisor.see_off = see_off
    thread, _ = start(supervisor)
    wait_for(lambda: told_by(supervisor)["state"] == "running")
    request = urllib.request.Request(f"{api.url}/events", headers={"Authorization": "Bearer key"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60.0) as stream:
        assert b"retry" in stream.readline()
        supervisor.operations.perform(operations.Stop())
        told = stream.read().decode()
        was_read.set()
    thread.join(120.0)
    api.close()
    assert not thread.is_alive() and found == [("stopping", True)]
    assert told_by(supervisor)["state"] == "stopped"
    assert told.endswith("event: end\ndata: {}\n\n") and '"state":"stopped"' in told


def test_a_stop_ends_every_service_and_says_stopped(tmp_path: Path) -> None:
    supervisor, launcher = make_supervisor(tmp_path, steps=10**6)
    thread, _ = start(supervisor)
    wait_for(lambda: told_by(supervisor)["state"] == "running")
    supervisor.operations.perform(operations.Stop())
    thread.join(120.0)
    assert not thread.is_alive()
    outcome = read_json(RunDir(tmp_path).outcome)
    assert outcome is not None and outcome["state"] == "stopped"
    assert "buffer.0" in launcher.killed


def test_scaling_up_starts_new_indices_and_scaling_down_drains_the_newest(tmp_path: Path) -> None:
    supervisor, launcher = make_supervisor(tmp_path, steps=10**6)
    thread, stop = start(supervisor)
    wait_for(lambda: told_by(supervisor)["state"] == "running")
    assert supervisor.fleet.scale(3).started == ("rollout.2",)
    wait_for(lambda: told_by(supervisor)["services"].get("rollout.2", {}).get("stage") == "READY")
    assert supervisor.fleet.scale(1).draining == (
        "rollout.2",
        "rollout.1",
    )
    wait_for(lambda: {"rollout.1", "rollout.2", "receiver.1", "receiver.2"} <= set(launcher.killed))
    wait_for(lambda: supervisor.fleet.num_draining == 0)
    assert supervisor.fleet.scale(2).started == ("rollout.1",)
    stop.set()
    thread.join(120.0)
    assert not thread.is_alive()


def test_a_leavers_process_is_ended_only_after_it_has_drained(tmp_path: Path) -> None:
    replace = {**REPLACE, "rollout": "scripted_services:SlowLeaver"}
    supervisor, launcher = make_supervisor(tmp_path, steps=10**6, replace=replace)
    thread, stop = start(supervisor)
    wait_for(lambda: told_by(supervisor)["state"] == "running")
    supervisor.operations.perform(operations.Scale(1))
    time.sleep(3 * PULSE_S)
    assert launcher.killed == []
    (tmp_path / "may-leave").touch()
    wait_for(lambda: "rollout.1" in launcher.killed)
    stop.set()
    thread.join(120.0)
    assert not thread.is_alive()


def test_a_checkpoint_that_a_learner_died_over_is_asked_of_the_next_one(tmp_path: Path) -> None:
    learner = {"learner": "scripted_services:AskedLearner"}
    supervisor, launcher = make_supervisor(tmp_path, steps=6, replace={**REPLACE, **learner})
    thread, stop = start(supervisor)
    wait_for(lambda: told_by(supervisor)["step"] == 5)
    supervisor.operations.perform(operations.WriteCheckpoint())
    launcher.gone.add("learner.0")
    wait_for(lambda: "1:" in (tmp_path / "asked").read_text())
    stop.set()
    thread.join(120.0)
    assert not thread.is_alive()
    assert (tmp_path / "asked").read_text() == "0:5 1:5 "


def test_more_replicas_than_the_machine_has_room_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, _ = make_supervisor(tmp_path, steps=10**6)
    thread, stop = start(supervisor)
    wait_for(lambda: told_by(supervisor)["state"] == "running")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(Refused, match=r"ask for 3\.5 CPUs, this machine has 2"):
        supervisor.operations.perform(operations.Scale(10))
    assert told_by(supervisor)["state"] == "running"
    stop.set()
    thread.join(120.0)
    assert not thread.is_alive()


def test_a_run_whose_first_groups_all_fail_ends_with_a_reason(tmp_path: Path) -> None:
    replace = {
        **REPLACE,
        "buffer": "scripted_services:PoisonedBuffer",
        "learner": "scripted_services:WaitingLearner",
        "rollout": "scripted_services:GivingUpReplica",
    }
    supervisor, _ = make_supervisor(tmp_path, replace=replace)
    supervisor.run(threading.Event())
    outcome = read_json(RunDir(tmp_path).outcome)
    assert outcome is not None and outcome["state"] == "failed"
    assert "gave up the first 32 prompts: the tool 'search' is not there (96 times" in outcome["error"]
    assert outcome["service"] == "rollout.0"


@pytest.mark.parametrize("replicas", [-1, 1.5, True, "two", None])
def test_a_number_of_replicas_that_makes_no_sense_is_refused(tmp_path: Path, replicas: object) -> None:
    supervisor, _ = make_supervisor(tmp_path)
    scale = supervisor.operations.routes()["POST /scale"]
    with pytest.raises(ConfigError, match=r"whole number|Expected `int`"):
        scale({"replicas": replicas})


def test_a_row_written_again_for_a_step_replaces_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"training/global_step": 1, "a": 1},
        {"training/global_step": 2, "a": 2},
        {"training/global_step": 1, "a": 3},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["a"] for row in load_rows(path)] == [3, 2]


def test_a_line_that_a_crash_tore_is_left_out_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"training/global_step": 1, "a": 1}\n{"training/global_step": 2, "a')
    assert [row["a"] for row in load_rows(path)] == [1]
    recorder = Recorder(path, RUNTIME)
    recorder.record({"training/global_step": 2, "a": 5})
    recorder.close()
    assert [row["a"] for row in load_rows(path)] == [1, 5]


def test_a_replica_that_never_gets_ready_ends_the_run_by_name(tmp_path: Path) -> None:
    supervisor, _ = make_supervisor(
        tmp_path,
        steps=10**9,
        replace=REPLACE | {"rollout": "scripted_services:Syncing"},
        start_deadline_s=0.5,
    )
    supervisor.run(threading.Event())
    outcome = read_json(RunDir(tmp_path).outcome)
    assert outcome is not None
    assert outcome["service"] == "rollout.0"
    assert "still SYNCING after 0.5 s" in outcome["error"]


def test_a_leaver_that_hangs_in_its_drain_is_ended_and_the_run_goes_on(tmp_path: Path) -> None:
    supervisor, launcher = make_supervisor(
        tmp_path,
        steps=10**9,
        replace=REPLACE | {"rollout": "scripted_services:StuckLeaver"},
        start_deadline_s=0.5,
    )
    thread, stop = start(supervisor)
    wait_for(lambda: told_by(supervisor)["state"] == "running")
    supervisor.operations.perform(operations.Scale(1))
    wait_for(lambda: "rollout.1" in launcher.killed)
    assert told_by(supervisor)["state"] == "running"
    stop.set()
    thread.join(120.0)


def test_rates_do_not_jump_when_a_replica_is_silent_for_a_pulse() -> None:
    meter = Meter()
    seen = {"rollout.0": {"tokens": 1000, "busy_s": 1.0, "idle_s": 0.0}}
    meter.update(0.0, statuses_of(seen))
    meter.update(1.0, statuses_of({"rollout.0": {"state": "SILENT"}}))
    seen["rollout.0"] = {"tokens": 1200, "busy_s": 3.0, "idle_s": 0.0}
    assert meter.update(2.0, statuses_of(seen))["perf/rollout_tokens_per_s"] == 100.0


def test_the_first_row_has_the_rate_since_the_first_token() -> None:
    meter = Meter()
    for now, tokens in ((0.0, 0), (60.0, 0), (60.25, 5), (62.0, 400)):
        meter.note(now, statuses_of({"rollout.0": {"tokens": tokens}}))
    first = meter.update(62.0, statuses_of({"rollout.0": {"tokens": 400, "busy_s": 2.0, "idle_s": 60.0}}))
    assert first["perf/rollout_tokens_per_s"] == 200.0
    assert (first["perf/rollout_tokens"], first["perf/rollout_tokens_s"]) == (400.0, 2.0)
    second = meter.update(63.0, statuses_of({"rollout.0": {"tokens": 400, "busy_s": 2.0, "idle_s": 61.0}}))
    assert (second["perf/rollout_tokens"], second["perf/rollout_tokens_s"]) == (0.0, 1.0)


def test_a_short_run_has_the_rate_of_all_its_tokens_although_none_came_after_its_first_step() -> None:
    rows = [
        {**ROW, "training/global_step": step, "perf/rollout_tokens": tokens, "perf/rollout_tokens_s": time_s}
        | {
            "time": 0.0,
            "timing_s/step": time_s,
            FIRST_AFTER_START: float(step == 1),
            "perf/rollout_tokens_per_s": 0.0,
        }
        for step, tokens, time_s in ((1, 300.0, 2.0), (2, 0.0, 1.0))
    ]
    assert summarise(read_history(rows, NAMES), make_config(2), Statuses())["rollout_tokens_per_s"] == 100.0


def test_rates_of_a_summary_leave_out_the_first_row_of_each_life(tmp_path: Path) -> None:
    rows = [
        {
            **ROW,
            "training/global_step": step,
            "timing_s/step": time_s,
            FIRST_AFTER_START: first,
            "perf/rollout_tokens_per_s": 1.0,
            "perf/rollout_idle_share": 0.0,
        }
        for step, time_s, first in ((1, 40.0, 1.0), (2, 0.5, 0.0), (3, 30.0, 1.0), (4, 0.5, 0.0))
    ]
    for row in rows:
        row["time"] = 1000.0 + row["training/global_step"]
    found = summarise(read_history(rows, NAMES), make_config(4), Statuses(), began=990.0)
    assert found["train_s"] == 1.0
    assert found["first_step_s"] == 13.0  # of the life that began at 990
    later = summarise(read_history(rows, NAMES), make_config(4), Statuses(), began=1005.0)
    assert later["first_step_s"] is None, "it trained no step"
