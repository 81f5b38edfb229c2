"""ReMax and the optimal token baseline through `asyncrl up`: with either, the reward rises."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from tests.system.learning.test_learning import gain_in_standard_errors
from tests.system.parts.up_run import UpRun

pytestmark = pytest.mark.long
PLAIN = ("learner.steps=80", "eval.every_steps=0")


def run(up: Callable[..., UpRun], name: str, *changes: str) -> UpRun:
    found = up(name, *PLAIN, *changes)
    code, output = found.finish()
    assert code == 0, output
    assert found.summary()["ledger_residue"] == 0
    return found


def test_remax_learns_from_its_own_greedy_answers_with_shaped_rewards(up: Callable[..., UpRun]) -> None:
    rows = run(
        up,
        "remax",
        "algorithm.advantage=remax",
        "reward.overlong={buffer_tokens: 1}",
        "learner.lr=3e-5",
        "learner.steps=140",
    ).rows()
    assert gain_in_standard_errors(rows) > 4
    assert all(row["critic/greedy_score/mean"] <= 1 for row in rows)
    # Each advantage is reward less baseline, so their means must fit together: with answers of one length.
    gaps = [row["critic/score/mean"] - row["critic/greedy_score/mean"] for row in rows]
    assert statistics.mean(gaps) == pytest.approx(
        statistics.mean(row["critic/advantages/mean"] for row in rows), abs=0.05
    )
    assert any("rollout/overlong_share" in row for row in rows)


def test_the_optimal_token_baseline_learns(up: Callable[..., UpRun]) -> None:
    rows = run(up, "otb", "algorithm.advantage=optimal_token_baseline").rows()
    assert gain_in_standard_errors(rows) > 4
