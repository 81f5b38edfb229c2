"""Agents that know OpenAI's API alone train a model through `asyncrl up`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli.audit.report import verify_run
from recipes.tool_agent.__main__ import CLUSTER
from tests.buffer.journals.redis.redis_parts import free_port
from tests.system.parts.gateway_agent import agents_at
from tests.system.parts.up_run import UpRun

pytestmark = pytest.mark.long
SMALL = ("rollout.replicas=1", "rollout.group_size=4", "learner.groups_per_step=4", "eval.every_steps=0")
NUM_STEPS, NUM_AGENTS = 20, 8


def test_agents_train_a_model_through_their_base_url(up: Callable[..., UpRun]):
    run = up("gateway", *SMALL, "rollout.gateway={port: 0}", f"learner.steps={NUM_STEPS}")
    status = run.wait_for(lambda s: bool(s["services"].get("rollout.0", {}).get("gateway")))
    gateway = status["services"]["rollout.0"]["gateway"]
    with agents_at(gateway, NUM_AGENTS) as episodes:
        code, output = run.finish()
    assert code == 0, output
    rows = run.rows()
    assert len(rows) == NUM_STEPS and run.summary()["ledger_residue"] == 0
    assert len(episodes.rewards) >= NUM_STEPS * 16
    means = [row["critic/rewards/mean"] for row in rows]
    assert 0.0 < sum(means) / NUM_STEPS < 1.0, "the rewards of the agents are not those that were trained"
    assert max(row["staleness/lag_max_trained"] for row in rows) <= 4


def start_recipe(folder: Path, *changes: str) -> UpRun:
    """Start the one command of the recipe in an empty folder: it makes the model, a run and agents."""
    sets = [part for change in (f"run.dir={folder}", *changes) for part in ("--set", change)]
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.tool_agent", "--port", str(free_port()), *sets],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CLUSTER.parents[2])},
    )
    return UpRun(folder / "tool_agent", process)


@pytest.mark.timeout(1500)
def test_the_recipe_learns_to_call_the_right_tool(tmp_path: Path):
    """From one in eight, in a third of its steps."""
    run = start_recipe(tmp_path, "learner.steps=40", "learner.lr_schedule=constant")
    try:
        code, output = run.finish(1200.0)
    finally:
        run.end()
    assert code == 0, output
    rewards = [row["critic/rewards/mean"] for row in run.rows()]
    assert len(rewards) == 40
    assert sum(rewards[:5]) / 5 <= 0.3, "it begins at chance"
    assert sum(rewards[-5:]) / 5 >= 0.4
    assert verify_run(str(run.folder), "")["findings"] == []
    assert run.summary()["ledger_residue"] == 0
