"""Ctrl-C, resume, scale and a crash, with the real parts."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.buffer.client import LearnerClient
from tests.system.parts.up_run import UpRun, leftovers

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 2.0 + len(solution_str)
"""
SHORT = ("rollout.replicas=1", "eval.every_steps=0", "checkpoint.every_steps=10")


@pytest.mark.long
def test_ctrl_c_checkpoints_and_up_again_goes_on_until_a_service_may_not_be_replaced(
    up: Callable[..., UpRun], tmp_path: Path
) -> None:
    """Two lives of one run: a start costs half a minute.

    The second one's reward is a user's own, in verl's signature, from a file in any folder.
    """
    run = up("interrupted", "learner.steps=2000", *SHORT)
    run.wait_for(lambda status: status["step"] >= 3)
    run.interrupt()
    code, output = run.finish()
    assert code == 130, output
    assert leftovers(run.folder) == []
    stopped_at = len(run.rows())

    (tmp_path / "my_reward.py").write_text(REWARD)
    reward = f"reward.fn={tmp_path / 'my_reward.py'}:compute_score"
    again = up("interrupted", "learner.steps=2000", "launcher.max_restarts=0", reward, *SHORT)
    again.wait_for(lambda status: status["step"] >= stopped_at + 5)
    printed = json.loads(again.command("status", "--json").stdout)
    os.kill(printed["services"]["rollout.0"]["pid"], signal.SIGKILL)
    code, output = again.finish()
    assert code == 1, output
    assert f"resumed at step {stopped_at}, residue 0" in output
    assert "the run failed in rollout.0" in output
    outcome = json.loads((run.folder / "outcome.json").read_text())
    assert outcome["service"] == "rollout.0" and len(outcome["tail"]) == 20
    rows = again.rows()
    assert [row["training/global_step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["critic/rewards/min"] >= 2, "the reward is not the user's"
    time.sleep(0.5)
    assert leftovers(run.folder) == []


@pytest.mark.long
def test_a_second_replica_joins_and_leaves_and_training_does_not_stand_still(
    up: Callable[..., UpRun],
) -> None:
    run = up("scaled", "learner.steps=2000", *SHORT)
    run.wait_for(lambda status: status["step"] >= 3)
    assert run.command("scale", "rollout=2").returncode == 0
    states: set[str] = set()

    def has_joined(status: dict) -> bool:  # type: ignore[type-arg]
        states.add(status["services"].get("rollout.1", {}).get("state", ""))
        return "READY" in states

    before = run.status()["step"]
    joined_at = run.wait_for(has_joined)["step"]
    assert joined_at > before, "training stood still while the replica joined"
    assert run.command("scale", "rollout=1").returncode == 0
    left = run.wait_for(lambda status: "rollout.1" not in status["services"])
    run.wait_for(lambda status: status["step"] > left["step"] + 3)
    assert run.status()["ledger"]["residue"] == 0
    run.interrupt()
    code, output = run.finish()
    assert code == 130, output
    assert "rollout.1: SYNCING -> READY" in (run.folder / "logs" / "rollout.1.log").read_text()


def test_ctrl_c_while_the_run_starts_leaves_nothing(up: Callable[..., UpRun]) -> None:
    run = up("nipped", *SHORT)
    wait_until_exists(run.folder / "logs" / "head.0.log")
    time.sleep(1.0)
    run.interrupt()
    code, output = run.finish()
    assert code == 130, output
    assert leftovers(run.folder) == []


PHASE = re.compile(r" +\d+\.\d s: ")
"""A phase of a stop, with the seconds since it was asked for."""
START = (
    *("up.head", "head.ray", "head.supervisor", "supervisor.begun", "rollout.engine"),
    *("learner.publishing@0", "learner.reserved@0", "learner.updated@2"),
)
"""From the first process of a start to its third step."""


@pytest.mark.long
@pytest.mark.parametrize("point", START)
def test_ctrl_c_at_any_moment_of_a_start_ends_it_within_ten_seconds(
    up: Callable[..., UpRun], point: str
) -> None:
    run = up(f"nipped-{point.partition('@')[0]}", *SHORT, interrupt=point)
    (code, output), ended_at = run.finish(), time.time()
    assert code == 130, output
    interrupted_at = run.told_at("stopping the run; Ctrl-C again")
    phases = [float(line.split()[0]) for _, line in run.told if PHASE.match(line)]
    assert phases and phases == sorted(phases), output
    assert ("To go on from the checkpoint" in output) == any(run.folder.glob("checkpoints/step-*")), output
    print(f"{point}: {ended_at - interrupted_at:.1f} s, {run.told[-1][1].rstrip()}")
    assert "Traceback" not in output and "stopped in" in output
    assert ended_at - interrupted_at < 10.0, output
    assert leftovers(run.folder) == []


def wait_until_exists(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.05)


@pytest.mark.long
def test_answers_that_a_leaving_replica_began_are_finished_by_another(up: Callable[..., UpRun]) -> None:
    lengths = ("rollout.max_tokens=200", "rollout.response_tokens=lognormal:0.5:150")
    few = ("rollout.group_size=2", "learner.groups_per_step=2", "learner.minibatches=1")
    one_by_one = ("rollout.max_sequences=1", *few)  # so that each replica is in the middle of one at any time
    wanted = ("learner.steps=2000", "rollout.resume_partial=true", "eval.every_steps=0")
    run = up("partial", *wanted, *lengths, *one_by_one)
    run.wait_for(lambda status: status["step"] >= 2 and len(ready(status)) == 2)
    assert run.command("scale", "rollout=1").returncode == 0
    left = run.wait_for(lambda status: "rollout.1" not in status["services"])
    assert reissues(run)["partial"] > 0
    run.wait_for(lambda status: status["step"] > left["step"] + 5)
    assert run.status()["ledger"]["residue"] == 0
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert leftovers(run.folder) == []


def ready(status: dict) -> list[str]:  # type: ignore[type-arg]
    services = status["services"]
    return [name for name in ("rollout.0", "rollout.1") if services.get(name, {}).get("state") == "READY"]


def reissues(run: UpRun) -> dict[str, int]:
    """Ask the buffer why tickets were issued again."""
    sockets = json.loads((run.folder / "run.json").read_text())["sockets"]
    client = LearnerClient(f"ipc://{sockets}/buffer.0")
    try:
        return dict(client.status().reissues)
    finally:
        client.close()
