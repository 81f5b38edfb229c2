"""Replay of a whole recorded run (two learner ranks, vLLM replicas), trained again without the replicas."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from tests.system.parts.up_run import UpRun, asyncrl_command

pytestmark = pytest.mark.long
SETTINGS = (
    "run.record=true",
    "learner.dp=2",
    "learner.cpus=0.5",
    "learner.steps=12",
    "checkpoint.every_steps=5",
    "checkpoint.keep=4",
    "eval.every_steps=0",
    "rollout.replicas=1",
)


def replay(run: UpRun, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = asyncrl_command("replay", run.folder.name, "--dir", str(run.runs_dir), *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_a_run_s_steps_train_again_bit_by_bit_in_as_many_ranks(up: Callable[..., UpRun]) -> None:
    run = up("recorded", *SETTINGS)
    code, output = run.finish()
    assert code == 0, output
    assert all(row["record/lost_steps"] == 0 for row in run.rows())
    done = replay(run, "--from", "6", "--steps", "5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["began_at"], [step["step"] for step in found["steps"]]) == (5, [5, 6, 7, 8, 9, 10])
    assert found["is_exact"] and all(step["num_metrics"] > 40 for step in found["steps"])
    assert any(step["has_weights"] for step in found["steps"])
    assert [step["step"] for step in found["steps"] if step["has_state"]] == [9], "the checkpoint of step 10"
    done = replay(run, "--from", "2", "--steps", "2", "--set", "learner.lr=3e-4", "--diff")
    assert done.returncode == 1, done.stderr
    # Its second minibatch sees what another rate has made of the first: the norm's mean differs, too.
    assert done.stdout.splitlines()[0].startswith("first difference: step 2, actor/")
