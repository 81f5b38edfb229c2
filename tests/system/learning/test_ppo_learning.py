"""PPO: a critic's advantages, and an adaptive KL to the reference, through `asyncrl up`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from tests.system.parts.up_run import UpRun

pytestmark = pytest.mark.long
PPO = ("algorithm.advantage=gae", "algorithm.gamma=0.99", "algorithm.lam=0.95", "critic.lr=1e-3")
KL = "algorithm.kl={coef: 0.001, where: reward, estimator: k1, adaptive: {target: 0.015}}"


def test_ppo_with_a_critic_solves_the_task(up: Callable[..., UpRun]) -> None:
    run = up("ppo", *PPO, "learner.steps=400")
    code, output = run.finish()
    assert code == 0, output
    summary = run.summary()
    assert summary["accuracy_start"] <= 0.15
    assert summary["accuracy_end"] >= 0.9
    assert summary["ledger_residue"] == 0
    # Once nearly all answers are right there is no variance left to explain.
    explained = [row["critic/vf_explained_var"] for row in run.rows()[:200]]
    assert statistics.mean(explained) > 0.03


def test_the_coefficient_of_an_adaptive_kl_goes_on_over_a_resume(up: Callable[..., UpRun]) -> None:
    changes = (*PPO, KL, "eval.every_steps=0", "rollout.replicas=1", "checkpoint.every_steps=10")
    first = up("ppo_kl", *changes, "learner.steps=20")
    assert first.finish()[0] == 0
    reached = first.rows()[-1]
    assert reached["actor/reward_kl_penalty_coeff"] != first.rows()[0]["actor/reward_kl_penalty_coeff"]
    second = up("ppo_kl", *changes, "learner.steps=24")
    code, output = second.finish()
    assert code == 0, output
    assert "resumed at step 20" in output
    resumed = next(row for row in second.rows() if row["training/global_step"] == 21)
    found, before = resumed["actor/reward_kl_penalty_coeff"], reached["actor/reward_kl_penalty_coeff"]
    assert found == pytest.approx(before, rel=0.2 * 128 / 10_000 * 1.01)  # one update of the controller
    assert found != before
