"""The long suite of whole runs: several seeds, so that what holds once is seen to hold again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from tests.different import assert_all_differ
from tests.system.parts.up_run import UpRun, leftovers


@pytest.fixture(scope="module")
def ends() -> dict[int, dict[str, torch.Tensor]]:
    """The weights at the end of the runs so far, by seed."""
    return {}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_run_of_any_seed_learns_within_the_bound_and_leaves_nothing(
    up: Callable[..., UpRun], seed: int, ends: dict[int, dict[str, torch.Tensor]]
) -> None:
    run = up(f"seed{seed}", f"run.seed={seed}", "learner.steps=120", "eval.every_steps=0")
    code, output = run.finish()
    assert code == 0, output
    rewards = [row["critic/rewards/mean"] for row in run.rows()]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.3
    assert max(row["staleness/lag_max_trained"] for row in run.rows()) <= 4
    assert run.summary()["ledger_residue"] == 0
    assert leftovers(run.folder) == []
    ends[seed] = load_file(run.folder / "weights" / "model.safetensors")
    if len(ends) > 1:
        assert_all_differ(ends.values(), in_every_tensor=True)
