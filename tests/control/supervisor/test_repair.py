"""A run whose services die, hang or are taken over, with scripted services in threads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_services import REPLACE
from thread_launcher import ThreadLauncher

from asyncrl.control.api import operations as api
from asyncrl.control.fleet.messages import Halted, Heard
from asyncrl.control.machine.kernel import LinuxKernel
from asyncrl.control.machine.processes import (
    end_service,
    is_alive,
    is_stopped,
    pids_of_service,
    stopped_services,
)
from asyncrl.control.reconciler.actuator import ServiceActuator
from asyncrl.control.reconciler.reconciler import FleetReconciler
from asyncrl.control.reconciler.status_events import at_home, event_of, events_of
from asyncrl.control.record.events import EventLog
from asyncrl.control.record.outcome import Outcome
from asyncrl.control.record.outcome import read_outcome as read_outcome_of
from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.control.roster import RUN_VARIABLE, Roster, ServiceSpec
from asyncrl.control.rows.recorder import Recorder, training_rows
from asyncrl.control.rows.row_files import load_rows
from asyncrl.control.supervisor import Supervisor
from asyncrl.core.errors import ConfigError, DeadlineExceeded, ServiceFailed
from asyncrl.core.metrics.run_names import FIRST_AFTER_START
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service import SERVICE_VARIABLE
from asyncrl.core.service_command import Bound, Tighten
from asyncrl.core.states import RunState
from tests.control.supervisor.test_supervisor import make_config
from tests.statuses import status_of, statuses_of, told_by
from tests.threads import RUNTIME
from tests.waiting import tell, wait_for

CORE = ["buffer.0", "weight_sync.0", "learner.0", "publisher.0"]

STOPPED = Outcome(state=RunState.STOPPED)


class Runtime(ThreadRuntime):
    """Threads, with a clock that stands still until it is moved."""

    time_s = 100.0

    def now(self) -> float:
        return self.time_s


class Run:
    """The upkeep of a scripted run, pulse by pulse."""

    def __init__(self, folder: Path, launcher: ThreadLauncher | None = None, **sections: Any) -> None:
        config = make_config(10**6).model_copy(update=sections)
        self.roster = Roster(config, folder, "abcd1234", folder, "", secret="secret")
        self.launcher = launcher or ThreadLauncher({**REPLACE, "learner": "scripted_services:WaitingLearner"})
        self.events = EventLog(RunDir(folder).events, RUNTIME)
        self.runtime = Runtime()
        self.upkeep = FleetReconciler(self.roster, self.launcher, self.events, self.runtime)

    def begin(self, replicas: int = 2, standby: int = 0) -> None:
        self.upkeep.begin(replicas, standby)
        self.pulse()
        self.launcher.started.clear()
        self.launcher.killed.clear()

    def pulse(self, seconds: float = 0.25) -> dict[str, dict[str, Any]]:
        self.runtime.time_s += seconds
        return self.upkeep.pulse()

    def kinds(self) -> list[tuple[str, str]]:
        return [(event["kind"], event["service"]) for event in self.events.newest(100)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.upkeep.stop(5.0, STOPPED)


@pytest.mark.parametrize("victim", [*CORE, "receiver.1", "rollout.1"])
def test_a_service_that_is_killed_is_started_again_while_the_others_go_on(run: Run, victim: str) -> None:
    run.begin()
    fallen = ["rollout.1", "receiver.1"] if victim == "rollout.1" else [victim]
    others = {name: run.launcher.service(name) for name in run.upkeep.pulse() if name not in fallen}
    run.launcher.gone.add(victim)
    run.pulse()
    assert run.launcher.killed == fallen
    assert run.launcher.started == fallen
    statuses = run.pulse()
    assert len(statuses) == 8 and not run.upkeep.is_degraded
    assert all(run.launcher.service(name) is service for name, service in others.items())
    assert run.upkeep.report.facts(victim).restarts == 1
    assert ("exit", victim) in run.kinds()
    assert [kind for kind, _ in run.kinds()][-1] == "ready"
    assert all(("restart", name) in run.kinds() for name in fallen)


def test_what_the_last_life_reported_is_not_held_against_the_next(run: Run) -> None:
    run.begin()
    run.launcher.gone |= {"rollout.1", "receiver.1", "rollout.0"}
    run.pulse()
    fallen = ["rollout.0", "receiver.0", "rollout.1", "receiver.1"]
    assert run.launcher.killed == run.launcher.started == fallen, "each once"
    assert [run.upkeep.report.facts(f"rollout.{index}").restarts for index in (0, 1)] == [1, 1]
    assert run.upkeep.report.facts("receiver.0").stage == "STARTING", "its READY was of the one before"


def test_ranks_that_fall_together_are_started_again_once(tmp_path: Path) -> None:
    learner = make_config(10**6).learner.model_copy(update={"dp": 2})
    run = Run(tmp_path, learner=learner)
    run.begin()
    run.launcher.gone |= {"learner.0", "learner.1"}
    run.pulse()
    assert run.launcher.killed == run.launcher.started == ["learner.0", "learner.1"]
    assert run.upkeep.report.facts("learner.0").restarts == 1
    run.upkeep.stop(5.0, STOPPED)


def test_in_between_two_lives_a_service_is_shown_as_dead_with_its_reason(run: Run) -> None:
    run.begin()
    for _ in range(2):
        run.launcher.gone.add("buffer.0")
        statuses = run.pulse()
    assert statuses["buffer.0"] == status_of("buffer.0", state="DEAD", error="gone: it was killed")
    assert run.upkeep.is_degraded
    run.pulse(1.0)
    assert run.launcher.started == ["buffer.0", "buffer.0"]


def test_a_silent_service_is_killed_and_replaced(run: Run) -> None:
    run.begin()
    run.launcher.silent.add("publisher.0")
    for _ in range(8):
        run.pulse(8.0)
    assert run.launcher.killed == ["publisher.0"]
    assert run.launcher.started == ["publisher.0"]
    assert "sent no heartbeat for 60 s" in str(run.events.newest(9))


def test_an_end_does_not_wait_for_who_is_silent(run: Run) -> None:
    run.begin()
    run.launcher.silent.add("publisher.0")
    for _ in range(2):
        run.pulse(5.0)
    stop, asked = run.launcher.stop, []
    run.launcher.stop = lambda names, limit: asked.extend(names) or stop(names, limit)  # type: ignore[method-assign,func-returns-value]
    unstopped, _ = run.upkeep.stop(5.0, STOPPED)
    assert unstopped == {"publisher.0"}
    assert len(asked) == 7 and "publisher.0" not in asked


def test_a_service_whose_child_is_stopped_counts_as_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        status = status_of("rollout.0", child_pids=[child.pid])
        assert event_of("rollout.0", status) == Heard("rollout.0", "READY")
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(child.pid))
        assert event_of("rollout.0", status) == Halted("rollout.0")
    finally:
        child.kill()
        child.wait()


def spawn(run_id: str, name: str) -> subprocess.Popen[bytes]:
    """Start a process with the marks of a service; SIGUSR1 ends it, as any that does not heed it."""
    environment = {**os.environ, RUN_VARIABLE: run_id, SERVICE_VARIABLE: name}
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)


def test_numbers_of_processes_on_another_node_touch_nobody_here(run: Run) -> None:
    run.begin()
    run_id = run.roster.run_id
    stranger, mine, child = spawn("stranger", ""), spawn(run_id, "rollout.1"), spawn(run_id, "rollout.1")
    try:
        wait_for(lambda: sorted(pids_of_service(run_id, "rollout.1")) == sorted([mine.pid, child.pid]))
        away = status_of("rollout.0", pid=stranger.pid, child_pids=[child.pid])
        home = replace(away, pid=mine.pid)
        assert at_home(run_id, "rollout.0", away) == replace(away, child_pids=())
        assert at_home(run_id, "rollout.1", home) == home
        assert end_service(run_id, "rollout.0", [child.pid]) == [], "it is another service's"
        hands = ServiceActuator(run.roster, run.launcher, run.events, LinuxKernel())
        for name, pid in (("rollout.0", stranger.pid), ("receiver.1", child.pid), ("rollout.1", mine.pid)):
            hands.note_processes(name, status_of(name, pid=pid))
        run.launcher.silent |= {"rollout.0", "receiver.1", "rollout.1"}
        hands.dump_stacks(["rollout.0", "receiver.1"])
        hands.dump_stacks(["rollout.1"])
        assert mine.wait(60.0) == -signal.SIGUSR1
        assert (stranger.poll(), child.poll()) == (None, None)
    finally:
        run.launcher.silent.clear()
        for process in (stranger, mine, child):
            process.kill()
            process.wait()


def test_all_processes_of_a_killed_service_die_and_those_of_others_do_not() -> None:
    mine, other, child = (spawn("repair77", name) for name in ("rollout.1", "rollout.10", ""))
    try:
        wait_for(lambda: pids_of_service("repair77", "rollout.1") == [mine.pid])
        os.kill(mine.pid, signal.SIGSTOP)
        wait_for(lambda: stopped_services("repair77") == {"rollout.1"})
        silent = {"rollout.1": {"state": "SILENT"}, "rollout.10": {"state": "SILENT"}}
        assert events_of("repair77", statuses_of(silent)) == [Halted("rollout.1")]
        reaper = threading.Thread(target=lambda: (mine.wait(), child.wait()))
        reaper.start()
        assert end_service("repair77", "rollout.1", [child.pid, os.getpid()]) == []
        reaper.join(60.0)
        assert not is_alive(mine.pid, "repair77") and not is_alive(child.pid, "repair77")
        assert other.poll() is None
    finally:
        for process in (mine, other, child):
            process.kill()
            process.wait()


def test_what_a_dead_replica_has_left_is_gone_before_it_is_started_again(run: Run) -> None:
    run.begin()
    marks = {RUN_VARIABLE: run.roster.run_id, SERVICE_VARIABLE: "rollout.1"}
    core = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, **marks}
    )
    folder = Path("/dev/shm") / run.roster.spec("receiver.1").context.shm_prefix
    folder.mkdir()
    segment = folder / "receiver.1-0"
    segment.touch()
    reaper = threading.Thread(target=core.wait)
    reaper.start()
    start, seen = run.launcher.start, []

    def look(spec: ServiceSpec) -> None:
        seen.append((spec.name, is_alive(core.pid, run.roster.run_id), segment.exists()))
        start(spec)

    run.launcher.start = look  # type: ignore[method-assign]
    try:
        wait_for(lambda: is_alive(core.pid, run.roster.run_id))
        run.launcher.gone.add("rollout.1")
        run.pulse()
        assert seen == [("rollout.1", False, False), ("receiver.1", False, False)]
    finally:
        core.kill()
        reaper.join(60.0)
        shutil.rmtree(folder)


def test_too_many_deaths_end_the_run_with_a_reason_that_names_the_service(run: Run) -> None:
    run.begin()
    for _ in range(6):
        run.launcher.gone.add("weight_sync.0")
        run.pulse()
        run.pulse(31.0)
    assert run.upkeep.given_up is not None
    assert run.upkeep.given_up.reason.startswith(
        "weight_sync.0 gone: it was killed; it was restarted 5 times"
    )


def test_a_bound_that_was_tightened_is_told_to_the_next_buffer(run: Run) -> None:
    asked: list[tuple[str, str]] = []
    command = run.launcher.command

    def listen(name: str, told: Any, deadline_s: float) -> Any:
        asked.append((name, told.word))
        return Bound(told.max_lag) if isinstance(told, Tighten) else command(name, told, deadline_s)

    run.launcher.command = listen  # type: ignore[method-assign]
    run.begin()
    run.upkeep.ask("buffer.0", Tighten(1))
    run.launcher.gone.add("buffer.0")
    run.pulse()
    run.pulse()
    assert asked.count(("buffer.0", "tighten")) == 2


def test_a_bound_is_told_until_the_buffer_takes_it_also_by_the_next_supervisor(tmp_path: Path) -> None:
    first = Run(tmp_path)
    taken: list[int] = []
    refusals = [DeadlineExceeded("not yet"), ServiceFailed("no")]
    command = first.launcher.command

    def listen(name: str, asked: Any, deadline_s: float) -> Any:
        if not isinstance(asked, Tighten):
            return command(name, asked, deadline_s)
        if taken and refusals:
            raise refusals.pop()
        taken.append(asked.max_lag)
        return Bound(asked.max_lag)

    first.launcher.command = listen  # type: ignore[method-assign]
    first.begin()
    first.upkeep.ask("buffer.0", Tighten(1))
    first.pulse()
    first.launcher.gone.add("buffer.0")
    first.pulse()
    for _ in range(2):
        first.pulse()
    assert (taken, refusals) == ([1], []), "refused twice, and the supervisor dies"
    second = Run(tmp_path, first.launcher)
    second.upkeep.begin(2, 0)
    for _ in range(3):
        second.pulse()
    assert taken == [1, 1], "and it is told no more"
    second.upkeep.stop(5.0, STOPPED)


def test_a_status_is_given_while_a_pulse_or_the_end_takes_its_time(run: Run) -> None:
    run.begin()
    given: list[tuple[str, bool]] = []

    def look() -> None:
        given.append((run.upkeep.report.facts("buffer.0").stage, run.upkeep.is_degraded))

    def look_and_ask() -> None:
        look()
        with pytest.raises(ConfigError, match="is being ended"):
            run.upkeep.scale(5)
        with pytest.raises(ConfigError, match="is being ended"):
            run.upkeep.drain(1)

    def beside(function: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            thread = threading.Thread(target=function, daemon=True)
            thread.start()
            thread.join(120.0)
            assert not thread.is_alive(), "it waits for the end of it"
            return then(*args)

        return call

    statuses, stop = run.launcher.statuses, run.launcher.stop
    run.launcher.statuses = beside(look, statuses)  # type: ignore[method-assign]
    run.pulse()
    run.launcher.statuses = statuses  # type: ignore[method-assign]
    run.launcher.stop = beside(look_and_ask, stop)  # type: ignore[method-assign]
    run.upkeep.stop(5.0, STOPPED)
    assert given == [("READY", False)] * 4


def test_at_a_take_over_a_replica_is_started_again_once_when_all_of_it_is_dead(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.begin()
    first.launcher.gone |= {"rollout.1", "receiver.1"}
    second = Run(tmp_path, first.launcher)
    asked: list[list[str]] = []
    statuses = first.launcher.statuses

    def note(names: Iterable[str], deadline_s: float) -> dict[str, dict[str, Any]]:
        asked.append([*names, *first.launcher.started])
        return statuses(asked[-1], deadline_s)

    first.launcher.statuses = note  # type: ignore[method-assign]
    second.upkeep.begin(2, 0)
    assert asked[:1] == [sorted([*CORE, "rollout.0", "receiver.0"])], "where they live is known before"
    assert first.launcher.started == ["rollout.1", "receiver.1"]
    second.pulse()
    assert second.upkeep.report.facts("rollout.1").restarts == 1
    second.upkeep.stop(5.0, STOPPED)


def test_a_new_supervisor_takes_over_who_lives_and_repairs_the_rest(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.begin()
    first.upkeep.drain(1)  # not carried to its end by the first
    launcher = first.launcher
    services = {name: launcher.service(name) for name in launcher.adopt()}
    launcher.gone.add("publisher.0")
    second = Run(tmp_path, launcher)
    launcher.started.clear()
    second.upkeep.begin(5, 0)
    second.pulse()
    assert launcher.started == ["publisher.0"]
    assert launcher.service("learner.0") is services["learner.0"]
    wait_for(lambda: "rollout.1" not in second.pulse())
    assert second.upkeep.replicas == [0, 2]
    assert "receiver.1" not in launcher.adopt()
    second.upkeep.stop(5.0, STOPPED)


def test_what_an_older_start_left_is_not_taken_over(tmp_path: Path) -> None:
    RunDir(tmp_path).fleet.write_text(json.dumps({"run_id": "an older one"}))
    run = Run(tmp_path)
    assert run.upkeep.begin(1, 0) is False
    assert "rollout.0" in run.launcher.started
    found = read_json(RunDir(tmp_path).fleet)
    assert found is not None and found["run_id"] == "abcd1234"
    run.upkeep.stop(5.0, STOPPED)


def test_a_process_that_nobody_knows_of_is_ended_at_a_take_over(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.begin()
    first.launcher.start(first.roster.spec("rollout.7"))  # it was to be killed when the supervisor died
    second = Run(tmp_path, first.launcher)
    second.upkeep.begin(2, 0)
    assert first.launcher.killed == ["rollout.7"]
    second.upkeep.stop(5.0, STOPPED)


def test_a_new_supervisor_of_a_run_that_was_being_ended_only_ends_it(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.begin()
    first.upkeep.ending = Outcome(state=RunState.FAILED, error="buffer.0 broke", service="buffer.0")
    first.pulse(0.0)
    first.launcher.gone.add("buffer.0")
    again = Supervisor(first.roster, first.launcher, Recorder(tmp_path / "metrics.jsonl", RUNTIME), RUNTIME)
    thread = threading.Thread(target=again.run, args=(stop := threading.Event(),))
    thread.start()
    thread.join(120.0)
    is_over = not thread.is_alive()
    stop.set()
    thread.join(120.0)
    assert is_over and first.launcher.started == []
    assert first.launcher.adopt() == set()
    assert read_outcome_of(RunDir(tmp_path)) == first.upkeep.ending


def make_supervised(folder: Path, learner: str, **learns: Any) -> tuple[Supervisor, ThreadLauncher]:
    launcher = ThreadLauncher({**REPLACE, "learner": f"scripted_services:{learner}"})
    return supervise_again(folder, launcher, **learns), launcher


def supervise_again(folder: Path, launcher: ThreadLauncher, **learns: Any) -> Supervisor:
    config = make_config(8)
    config = config.model_copy(update={"learner": config.learner.model_copy(update=learns)})
    roster = Roster(config, folder, "abcd1234", folder, "")
    return Supervisor(roster, launcher, Recorder(folder / "metrics.jsonl", RUNTIME), RUNTIME)


def read_outcome(folder: Path) -> dict[str, Any]:
    outcome = read_json(RunDir(folder).outcome)
    assert outcome is not None
    return outcome


def test_while_the_learner_writes_its_last_checkpoint_the_others_are_kept_up(tmp_path: Path) -> None:
    supervisor, launcher = make_supervised(tmp_path, "SlowSaver")
    thread = threading.Thread(target=supervisor.run, args=(threading.Event(),))
    thread.start()
    wait_for(lambda: supervisor.lifecycle.state == "running")
    supervisor.operations.perform(api.Stop())
    wait_for(lambda: supervisor.lifecycle.state == "stopping")
    launcher.gone.add("buffer.0")
    wait_for(lambda: launcher.started.count("buffer.0") == 2)
    (tmp_path / "may-save").touch()
    thread.join(120.0)
    assert not thread.is_alive()
    assert (read_outcome(tmp_path)["state"], launcher.started.count("learner.0")) == ("stopped", 1)


@pytest.mark.parametrize("learner", ["SlowSaver", "HeldUpSaver"])
def test_a_stop_whose_checkpoint_could_not_be_written_is_a_failure_that_is_said_once(
    tmp_path: Path, learner: str
) -> None:
    supervisor, launcher = make_supervised(tmp_path, learner)
    tell(tmp_path / "may-save", "no space left on device")
    stop = threading.Event()
    thread = threading.Thread(target=supervisor.run, args=(stop,))
    thread.start()
    wait_for(lambda: supervisor.lifecycle.state == "running")
    stop.set()
    thread.join(120.0)
    outcome = read_outcome(tmp_path)
    assert (outcome["state"], outcome["service"]) == ("failed", "learner.0")
    assert outcome["error"].startswith("learner.0 failed: OSError: no space left on device; it wrote no")
    assert launcher.started.count("learner.0") == 1, "nobody wants it to go on"


@pytest.mark.parametrize("is_learner_dead", [False, True])
def test_a_stop_outlives_the_supervisor_that_was_asked(tmp_path: Path, is_learner_dead: bool) -> None:
    supervisor, launcher = make_supervised(tmp_path, "WaitingLearner")
    supervisor._begin()
    supervisor.operations.perform(api.Stop())  # and is killed
    launcher.started.clear()
    if is_learner_dead:
        launcher.gone.add("learner.0")
    supervise_again(tmp_path, launcher).run(threading.Event())
    assert launcher.started == []
    assert read_outcome(tmp_path)["state"] == ("failed" if is_learner_dead else "stopped")


def test_a_run_that_is_over_is_not_begun_again(tmp_path: Path) -> None:
    supervisor, launcher = make_supervised(tmp_path, "ScriptedLearner")
    supervisor.run(threading.Event())
    RunDir(tmp_path).outcome.unlink()  # it was killed in its very last moments
    launcher.started.clear()
    supervise_again(tmp_path, launcher).run(threading.Event())
    assert launcher.started == []
    assert read_outcome(tmp_path)["state"] == "finished"


def test_a_learner_that_dies_when_its_work_is_done_is_done(tmp_path: Path) -> None:
    supervisor, launcher = make_supervised(tmp_path, "ScriptedLearner")
    supervisor._begin()
    wait_for(lambda: launcher.statuses(["learner.0"], 1.0)["learner.0"].state == "ENDED")
    supervisor._observe()
    launcher.gone.add("learner.0")
    again = supervise_again(tmp_path, launcher)
    again._begin()
    again._observe()
    assert again._is_learner_done()
    again._end(STOPPED)


def test_a_rank_that_never_ends_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.control.supervisor.LEARNER_STOP_S", 0.3)
    supervisor, _ = make_supervised(tmp_path, "make_ranked_learner", dp=2)
    thread = threading.Thread(target=supervisor.run, args=(stop := threading.Event(),))
    thread.start()
    thread.join(120.0)
    is_over = not thread.is_alive()
    stop.set()
    thread.join(120.0)
    assert is_over and read_outcome(tmp_path)["state"] == "finished"


def test_rows_of_steps_that_a_new_learner_takes_again_replace_the_older_ones(tmp_path: Path) -> None:
    supervisor, launcher = make_supervised(tmp_path, "PacedLearner")
    thread = threading.Thread(target=supervisor.run, args=(threading.Event(),))
    thread.start()
    wait_for(lambda: told_by(supervisor)["metrics"].get("training/global_step") == 5)
    launcher.gone.add("learner.0")
    wait_for(lambda: launcher.started.count("learner.0") == 2)
    (tmp_path / "go-on").touch()
    thread.join(120.0)
    assert not thread.is_alive()
    rows = training_rows(load_rows(tmp_path / "metrics.jsonl"))
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["incarnation"] for row in rows] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [row[FIRST_AFTER_START] for row in rows] == [1, 0, 1, 0, 0, 0, 0, 0]
    outcome = read_json(RunDir(tmp_path).outcome)
    assert outcome is not None and outcome["state"] == "finished"


def test_a_new_supervisor_records_no_row_of_a_living_learner_twice(tmp_path: Path) -> None:
    supervisor, launcher = make_supervised(tmp_path, "PacedLearner")
    supervisor._begin()
    wait_for(lambda: launcher.service("learner.0").status().step == 5)
    supervisor._observe()
    roster = Roster(make_config(8), tmp_path, "abcd1234", tmp_path, "")
    again = Supervisor(roster, launcher, Recorder(tmp_path / "metrics.jsonl", RUNTIME), RUNTIME)
    (tmp_path / "go-on").touch()
    again.run(threading.Event())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in training_rows(lines)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert launcher.started.count("learner.0") == 1
    assert told_by(again)["step"] == 8


def test_a_run_that_takes_no_steps_says_who_waits_for_whom_and_dumps_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.control.diagnosis.watchdog.AT_LEAST_S", 0.5)
    monkeypatch.setattr("asyncrl.control.diagnosis.watchdog.TIMES_USUAL", 1.0)
    supervisor, launcher = make_supervised(tmp_path, "PacedLearner")
    thread = threading.Thread(target=supervisor.run, args=(threading.Event(),))
    thread.start()
    wait_for(lambda: told_by(supervisor)["step"] == 5)
    wait_for(lambda: len(launcher.dumped) >= 8)
    (stall,) = [event for event in told_by(supervisor)["events"] if event["kind"] == "stall"][:1]
    assert stall["waiting"][0] == "learner.0 waits for buffer.0: 0 of 16 groups are stored"
    assert told_by(supervisor)["health"] == "degraded"
    (tmp_path / "go-on").touch()
    thread.join(120.0)
    assert not thread.is_alive()
