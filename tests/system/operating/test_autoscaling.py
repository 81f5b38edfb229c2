"""A run with a range of replicas takes more while its learner waits, and gives them back once it does not.

A whole run of `asyncrl up` with scripted engines, of six minutes, most of them the autoscaler's patience:
`pytest -m long -s tests/system/operating/test_autoscaling.py` prints each decision with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.audit.report import verify_run
from asyncrl.control.record.events import load_events
from tests.system.parts.slow_learner import VARIABLE
from tests.system.parts.up_run import UpRun, leftovers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

CHANGE_DEADLINE_S = 400.0
"""Until a decision is carried out: 90 s of steps, 120 s of patience, and a start on a busy machine."""
STEP_S = "6.0"
"""One replica makes the 8 groups of a step in 1.3 s, in 2.6 s on a machine that does much else."""
SETS = (
    "rollout.engine=scripted",
    "rollout.replicas={min: 1, max: 3}",
    "rollout.group_size=4",
    "rollout.max_sequences=4",
    "rollout.max_tokens=128",
    "rollout.response_tokens=lognormal:0.3:60",
    "learner.groups_per_step=8",
    "learner.minibatches=1",
    "learner.steps=100000",
    "algorithm.advantage=slow_learner:slow",
    "eval.every_steps=0",
    "checkpoint.every_steps=100",
)


def serving(status: dict[str, Any]) -> list[str]:
    """Return the replicas that are READY."""
    return [
        name
        for name, service in status["services"].items()
        if name.startswith("rollout.") and service["state"] == "READY"
    ]


def decisions_of(run: UpRun) -> list[dict[str, Any]]:
    """Return what the autoscaler has carried out; what it was refused names no replicas."""
    events = load_events(run.folder / "events.jsonl")
    return [event for event in events if event["kind"] == "autoscale" and "replicas" in event]


def follow(run: UpRun, replicas: int) -> list[int]:
    """Wait until so many replicas serve; return the steps that each look found."""
    steps: list[int] = []

    def has_come(status: dict[str, Any]) -> bool:
        assert status["state"] == "running", status["state"]
        account = status["ledger"]  # empty where the buffer did not answer in time
        assert not account or account["residue"] == 0
        steps.append(status["step"])
        return len(serving(status)) == replicas

    run.wait_for(has_come, CHANGE_DEADLINE_S)
    print(
        f"{replicas} serve at step {steps[-1]}: {[one['text'] for one in decisions_of(run)][-1:]}", flush=True
    )
    return steps


def test_a_fleet_grows_while_the_learner_waits_and_shrinks_once_it_is_the_slower_one(
    up: Callable[..., UpRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowness = tmp_path / "slowness"
    monkeypatch.setenv(VARIABLE, str(slowness))
    run = up("autoscaled", *SETS)
    run.wait_for(lambda status: status["state"] == "running" and len(serving(status)) == 1)
    looks = [follow(run, 2), follow(run, 3)]
    slowness.write_text(STEP_S)
    looks.append(follow(run, 2))

    assert all(steps[-1] > steps[0] for steps in looks), "training stood still during a change"
    decisions = decisions_of(run)
    assert [one["text"].split(":")[0] for one in decisions] == [
        "1 -> 2 replicas",
        "2 -> 3 replicas",
        "3 -> 2 replicas",
    ]
    assert all("the learner idles" in one["text"] for one in decisions)
    restarts = [service["restarts"] for service in run.status()["services"].values()]
    assert not any(restarts), "somebody had to be started again"
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["ledger_residue"] == 0
    assert verify_run(str(run.folder), "")["findings"] == []
    assert leftovers(run.folder) == []
