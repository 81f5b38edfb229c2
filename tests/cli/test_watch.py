import io
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncrl.cli import exits
from asyncrl.cli.up import find_config, follow, placed, sigterm_as_interrupt
from asyncrl.cli.watch import POLL_S, LineView, PanelView, view_on, watch
from asyncrl.clock import ManualClock
from asyncrl.config.load import load
from asyncrl.control.record.rundir import RunDir
from asyncrl.errors import ConfigError


@dataclass
class ScriptedRun:
    """A run that shows given snapshots, one per poll, and then is over. An exception is raised."""

    snapshots: list
    folder: RunDir = field(default_factory=lambda: RunDir(Path("runs/x")))
    outcome: dict = field(default_factory=lambda: {"state": "finished"})
    stops: list = field(default_factory=list)

    @property
    def is_over(self):
        return not self.snapshots

    def poll(self):
        snapshot = self.snapshots.pop(0)
        if isinstance(snapshot, BaseException):
            raise snapshot
        return snapshot

    def stop(self, deadline_s):
        self.stops.append(deadline_s)

    def result(self):
        return self.outcome


def at(step):
    return {"run": "x", "state": "running", "step": step, "steps": 3, "metrics": {"critic/rewards/mean": 0.5}}


def test_a_step_is_one_line_however_often_it_is_seen():
    stream = io.StringIO()
    run = ScriptedRun([{"state": "starting"}, {"state": "starting"}, at(1), at(1), at(2)])
    watch(run, LineView(stream), ManualClock())
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == [
        "run: starting",
        "step 1/3",
        "step 2/3",
    ]


def test_watching_sleeps_between_polls():
    clock = ManualClock()
    watch(ScriptedRun([at(1), at(2)]), LineView(io.StringIO()), clock)
    assert clock.now() == 2 * POLL_S


def test_the_panel_is_drawn_and_left_behind():
    stream = io.StringIO()
    watch(ScriptedRun([at(1), at(2)]), PanelView(stream), ManualClock())
    assert "2/3" in stream.getvalue()


def test_a_stream_that_is_no_terminal_gets_lines():
    assert isinstance(view_on(io.StringIO()), LineView)


def test_ctrl_c_stops_the_run_and_ends_with_130():
    run = ScriptedRun([at(1), KeyboardInterrupt()])
    assert follow(run) == exits.INTERRUPTED
    assert len(run.stops) == 1


def test_a_failed_run_ends_with_1_and_tells_service_error_log_tail_on_stderr(capsys):
    outcome = {"state": "failed", "service": "rollout.1", "error": "no GPU", "tail": ["last words"]}
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
