"""Whole runs say what was done to them: a process killed, a folder or all checkpoints removed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable

import pytest

from asyncrl.control.ray.launcher import KILLED
from asyncrl.control.record.events import load_events
from asyncrl.control.record.rundir import RunDir, read_json
from tests.system.parts.up_run import UpRun, leftovers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
QUITE_LONG_S = 600.0
"""Of a run of a few steps on a machine that others keep busy."""
QUICK = ("rollout.replicas=1", "rollout.engine=scripted", "eval.every_steps=0")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_learner_and_a_removed_folder_are_told_as_that(
    number: signal.Signals, up: Callable[..., UpRun]
) -> None:
    """NCCL's watchdog ends a rank by SIGABRT."""
    run = up("removed", *QUICK, "learner.steps=100000")
    status = run.wait_for(lambda status: status["step"] >= 3, 400.0)
    os.kill(status["services"]["learner.0"]["pid"], number)
    folder = RunDir(run.folder)
    run.wait_for(lambda _: any(one["kind"] == "exit" for one in load_events(folder.events)))
    told = next(one for one in load_events(folder.events) if one["kind"] == "exit")
    assert told["text"].startswith(f"learner.0 gone: {KILLED}")
    run.wait_for(lambda status: status["step"] >= 6)
    shutil.move(run.folder, away := run.folder.with_name("moved away"))
    code, output = run.finish(QUITE_LONG_S)
    assert code == 1, output
    assert f"the run failed: the run's folder {run.folder} was removed. " in output, output
    assert "To begin anew: asyncrl up " in output
    outcome = read_json(folder.outcome)
    assert outcome is not None and outcome["is_removed"]
    assert leftovers(away) == []


def test_a_run_whose_checkpoints_are_all_gone_is_refused_at_once_and_goes_on_with_one_of_them(
    up: Callable[..., UpRun],
) -> None:
    kept = ("checkpoint.every_steps=2", "checkpoint.keep=2")
    run = up("bereft", *QUICK, *kept, "learner.steps=6")
    code, output = run.finish(QUITE_LONG_S)
    assert code == 0, output
    checkpoints = run.folder / "checkpoints"
    aside = shutil.move(checkpoints, run.folder.with_name("restored"))
    code, output = up("bereft", *QUICK, *kept, "learner.steps=8").finish(QUITE_LONG_S)
    assert code == 2, output
    assert f"and none of them is in {checkpoints}" in output and "put one of them back there" in output
    shutil.move(aside, checkpoints)
    last = up("bereft", *QUICK, *kept, "learner.steps=8")
    code, output = last.finish(QUITE_LONG_S)
    assert code == 0, output
    assert last.summary()["ledger_residue"] == 0
    live = read_json(RunDir(last.folder).live)
    assert live is not None and live["log_sizes"]["buffer.0"] > 0, "where this life's log begins"
