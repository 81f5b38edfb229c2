"""The demo on the second backend: it learns through `asyncrl up`, and the account is clean."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from tests.system.parts.up_run import UpRun

pytestmark = pytest.mark.long
NUM_STEPS = 150


def test_the_demo_learns_on_fsdp2(up: Callable[..., UpRun]) -> None:
    changes = ("learner.backend=fsdp2", f"learner.steps={NUM_STEPS}", "eval.every_steps=50")
    run = up("fsdp2", *changes)
    code, output = run.finish()
    assert code == 0, output
    rewards = [row["critic/rewards/mean"] for row in run.rows()]
    assert len(rewards) == NUM_STEPS
    assert statistics.mean(rewards[:10]) < 0.2
    assert statistics.mean(rewards[-10:]) > 0.5
    assert run.summary()["ledger_residue"] == 0
    assert max(row["staleness/lag_max_trained"] for row in run.rows()) <= 4
