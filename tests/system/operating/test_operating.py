"""A run is held, saved, let go and its replicas changed from the command line, with the real parts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.system.parts.up_run import UpRun

QUIET = ("rollout.replicas=1", "eval.every_steps=0", "checkpoint.every_steps=1000", "learner.steps=2000")


@pytest.mark.long
def test_a_run_is_paused_saved_let_go_and_its_replica_replaced(up: Callable[..., UpRun]) -> None:
    run = up("operated", *QUIET)
    run.wait_for(lambda status: status["step"] >= 3)
    hold_and_save(run)
    before = snapshot(run)["step"]
    assert run.command("unpause").returncode == 0
    run.wait_for(lambda status: status["step"] >= before + 3 and not status["paused"])
    replace_replica(run)
    lines = run.command("logs", "-n", "3", "supervisor", "--json").stdout.splitlines()
    assert len(lines) == 3 and {json.loads(line)["service"] for line in lines} == {"supervisor.0"}
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["ledger_residue"] == 0


def snapshot(run: UpRun) -> dict[str, Any]:
    """Return the run's status; on a busy machine one look may find no answer in time."""
    return run.wait_for(lambda status: True, 30.0)


def hold_and_save(run: UpRun) -> None:
    """Pause: no step is taken, the bottleneck is the operator, and a checkpoint can be asked for."""
    assert run.command("pause").returncode == 0
    held = run.wait_for(lambda status: status["paused"] and status["bottleneck"]["who"] == "operator")
    time.sleep(2.0)  # the step that was in progress ends
    at = snapshot(run)["step"]
    saved = json.loads(run.command("checkpoint").stdout)["step"]
    assert saved == at >= held["step"]
    time.sleep(3.0)
    status = snapshot(run)
    assert status["step"] == at, "a step was taken in the pause"
    assert status["ledger"]["checkpoints"] == [at]


def replace_replica(run: UpRun) -> None:
    """Drain the only replica: another one comes, it leaves, and no group is lost."""
    assert run.command("drain", "rollout.0").returncode == 0
    after = run.wait_for(
        lambda status: (
            "rollout.0" not in status["services"]
            and any(
                name.startswith("rollout.") and one["state"] == "READY"
                for name, one in status["services"].items()
            )
        )
    )
    run.wait_for(lambda status: status["step"] >= after["step"] + 3)
    assert snapshot(run)["ledger"]["residue"] == 0
