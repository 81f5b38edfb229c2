import io
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncrl.cli import exits
from asyncrl.cli.up import find_config, placed
from asyncrl.cli.views import LineView
from asyncrl.cli.watch import (
    POLL_S,
    PhaseTimer,
    follow,
    follow_until_up,
    sigterm_as_interrupt,
    watch,
)
from asyncrl.control.record.outcome import Outcome
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.snapshot import HeadWord, Snapshot
from asyncrl.core.config.load import load
from asyncrl.core.errors import ConfigError
from asyncrl.core.states import RunState
from tests.runtimes import ManualClock
from tests.statuses import snapshot_of


@dataclass
class ScriptedRun:
    """A run that shows given snapshots, one per poll, and then is over. An exception is raised."""

    snapshots: list
    folder: RunDir = field(default_factory=lambda: RunDir(Path("runs/x")))
    outcome: Outcome = field(default_factory=lambda: Outcome(state=RunState.FINISHED))
    stops: list = field(default_factory=list)
    interrupts_stop: bool = False
    is_cleared: bool = False

    @property
    def is_over(self):
        return not self.snapshots

    def poll(self):
        snapshot = self.snapshots.pop(0)
        if isinstance(snapshot, BaseException):
            raise snapshot
        return snapshot

    def stop(self, deadline_s, show=lambda snapshot: None):
        self.stops.append(deadline_s)
        if self.interrupts_stop and len(self.stops) == 1:
            raise KeyboardInterrupt

    def clear(self):
        self.is_cleared = True

    def result(self):
        return self.outcome


def at(step):
    metrics = {"critic/rewards/mean": 0.5}
    return Snapshot(run="x", state=RunState.RUNNING, step=step, steps=3, metrics=metrics)


def test_watching_sleeps_between_polls():
    clock = ManualClock()
    watch(ScriptedRun([at(1), at(2)]), LineView(io.StringIO()), clock)
    assert clock.now() == 2 * POLL_S


def test_ctrl_c_stops_the_run_and_ends_with_130():
    run = ScriptedRun([at(1), KeyboardInterrupt()])
    assert follow(run) == exits.INTERRUPTED
    assert len(run.stops) == 1


def test_a_second_ctrl_c_ends_the_run_at_once():
    run = ScriptedRun([KeyboardInterrupt()], interrupts_stop=True)
    assert follow(run) == exits.INTERRUPTED
    assert run.stops[-1] == 0.0


def test_what_a_run_has_left_is_ended_before_its_outcome_is_told():
    run = ScriptedRun([at(1)])
    follow(run)
    assert run.is_cleared


def test_a_detached_run_is_watched_until_its_services_are_known():
    run = ScriptedRun([HeadWord(state=RunState.STARTING), at(0), at(1)])
    assert follow_until_up(run, LineView(io.StringIO()), ManualClock())
    assert len(run.snapshots) == 1


def test_a_detached_run_that_ends_before_that_is_not_up():
    assert not follow_until_up(
        ScriptedRun([HeadWord(state=RunState.STARTING)]), LineView(io.StringIO()), ManualClock()
    )


def test_ctrl_c_before_a_detached_run_is_up_stops_it():
    run = ScriptedRun([HeadWord(state=RunState.STARTING), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        follow_until_up(run, LineView(io.StringIO()), ManualClock())
    assert len(run.stops) == 1


def test_the_parts_of_an_end_are_told_as_they_begin_and_add_up_to_the_whole():
    clock, told = ManualClock(), []
    timer = PhaseTimer(clock, told.append)
    for phase, lasting_s in (("a checkpoint", 1.0), ("a checkpoint", 2.0), ("ending Ray", 2.0)):
        timer.show(Snapshot(state=RunState.STOPPING, phase=phase))
        clock.advance(lasting_s)
    assert timer.summary() == "a checkpoint 3.0 s, ending Ray 2.0 s"
    assert told == ["   0.0 s: a checkpoint", "   3.0 s: ending Ray"]


def test_what_a_start_is_busy_with_is_not_told_as_a_part_of_its_end() -> None:
    told: list[str] = []
    timer = PhaseTimer(ManualClock(), told.append)
    for state, phase in (("starting", "2 of 2 engines load and compile"), ("stopping", "ending Ray")):
        timer.show(snapshot_of(state=state, phase=phase))
    assert told == ["   0.0 s: the run is asked to stop", "   0.0 s: ending Ray"]


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_stopped_run_says_from_which_checkpoint_it_goes_on_and_none_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_checkpoint: bool
) -> None:
    if has_checkpoint:
        (tmp_path / "checkpoints" / "step-00000040").mkdir(parents=True)
    follow(ScriptedRun([KeyboardInterrupt()], folder=RunDir(tmp_path)))
    said = capsys.readouterr().err
    assert ("To go on from the checkpoint of step 40: asyncrl up" in said) is has_checkpoint
    assert ("No checkpoint was written; to begin anew: asyncrl up" in said) is not has_checkpoint


def test_a_failed_run_ends_with_1_and_tells_service_error_log_tail_on_stderr(capsys):
    outcome = Outcome(state=RunState.FAILED, service="rollout.1", error="no GPU", tail=("last words",))
    assert follow(ScriptedRun([at(1)], outcome=outcome)) == exits.FAILED
    shown = capsys.readouterr()
    assert "the run failed in rollout.1: no GPU" in shown.err
    assert "| last words" in shown.err
    assert "failed" not in shown.out


def test_a_finished_run_ends_with_0_and_prints_its_summary_on_stdout(capsys, tmp_path):
    (tmp_path / "summary.json").write_text('{"steps": 3, "lag_mean": 1.5}')
    assert follow(ScriptedRun([at(1)], folder=RunDir(tmp_path))) == exits.OK
    assert "lag_mean  1.5" in capsys.readouterr().out


def test_sigterm_interrupts_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_shipped_configuration_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("quickstart").name == "quickstart.yaml"
    with pytest.raises(ConfigError, match="Did you mean 'quickstart'"):
        find_config("quickstrat")


def test_what_the_plan_finds_gets_the_place_of_its_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: {path: m}\ndata: {train: t}\nreward: {fn: f}\n")
    error = ConfigError("model.path: no folder 'm'\nthe machine has 2 CPUs", hint="Lower it")
    assert str(placed(error, load("a.yaml"))) == (
        "a.yaml:1:15: model.path: no folder 'm'\nthe machine has 2 CPUs\nLower it"
    )
