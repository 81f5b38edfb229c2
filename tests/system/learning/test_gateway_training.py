"""Agents that know OpenAI's API alone train a model through `asyncrl up`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
