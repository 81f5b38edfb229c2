"""At `max_lag: 0` a run is a function of its seed, whatever the replicas do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors.torch import load_file

from tests.system.up_run import UpRun

SETTINGS = ("staleness.max_lag=0", "learner.steps=5", "eval.every_steps=0")


def test_two_runs_of_one_seed_end_with_identical_weights_and_learner_and_engine_agree(
    up: Callable[..., UpRun],
) -> None:
    """One run has two replicas and the other has one, so that nothing depends on who does what."""
    first = up("deterministic_1", "rollout.replicas=2", *SETTINGS)
    code, output = first.finish()
    assert code == 0, output
    second = up("deterministic_2", "rollout.replicas=1", *SETTINGS)
    code, output = second.finish()
    assert code == 0, output
    weights, others = (load_file(run.folder / "weights" / "model.safetensors") for run in (first, second))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name
    for run in (first, second):
        for row in run.rows():
            assert row["staleness/lag_max_trained"] == 0
            # Probabilities of the same tokens, recomputed by the learner and recorded by the engine.
            assert row["training/rollout_probs_diff_max"] <= 1e-4
            assert row["rollout_corr/log_ppl_abs_diff"] <= 1e-4
