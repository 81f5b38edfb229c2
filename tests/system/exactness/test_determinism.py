"""At `max_lag: 0` a run is a function of its seed, and the engine samples from the learner's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.different import assert_all_differ
from tests.rollout.engine.families import WIDTHS, Form
from tests.system.parts.own_task import write_task
from tests.system.parts.up_run import UpRun

NUM_STEPS = 12
SETTINGS = ("staleness.max_lag=0", f"learner.steps={NUM_STEPS}")
MAX_GAP_NATS = 1e-5
LONGEST_S = 1000.0
"""A step over 151,936 logits took 18 s beside much other work."""
TIED = Form("qwen3", is_tied=True, vocab_size=131)
ROWS = (
    (Form("llama", is_tied=True, vocab_size=87, width=WIDTHS[3]), "fsdp2"),
    (Form("llama", is_tied=False, vocab_size=131), "megatron"),
    (Form("qwen2", is_tied=True, vocab_size=96, width=WIDTHS[1]), "megatron"),
    (Form("qwen2", is_tied=False, vocab_size=87), "fsdp2"),
    (Form("qwen3", is_tied=True, vocab_size=151_936), "fsdp2"),
    (Form("qwen3", is_tied=False, vocab_size=128, width=WIDTHS[2]), "megatron"),
)


def finish(run: UpRun, task: Path) -> dict[str, torch.Tensor]:
    """Wait for the end; return the weights. Every tensor has moved, with engine and learner as one."""
    code, output = run.finish(LONGEST_S)
    assert code == 0, output
    weights = load_file(run.folder / "weights" / "model.safetensors")
    assert_all_differ([load_file(task / "model.safetensors"), weights], in_every_tensor=True)
    counts = run.summary()["guard"]
    assert counts and not any(counts.values()), counts
    rows = run.rows()
    assert len(rows) == NUM_STEPS
    for row in rows:
        assert row["staleness/lag_max_trained"] == 0
        # Probabilities of the same tokens, recomputed by the learner and recorded by the engine.
        assert row["training/rollout_probs_diff_max"] <= 1e-4
        assert row["rollout_corr/log_ppl_abs_diff"] < MAX_GAP_NATS, f"step {row['training/global_step']}"
    return weights


@pytest.mark.long
def test_two_runs_of_one_seed_end_with_identical_weights_and_learner_and_engine_agree(
    up: Callable[..., UpRun], tmp_path: Path
) -> None:
    """One run has two replicas and the other has one, so that nothing depends on who does what."""
    settings = (*write_task(tmp_path, TIED), *SETTINGS)
    weights = finish(up("deterministic_1", "rollout.replicas=2", *settings), tmp_path)
    others = finish(up("deterministic_2", "rollout.replicas=1", *settings), tmp_path)
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("form", "backend"), ROWS, ids=str)
def test_learner_and_engine_agree_at_every_step(
    form: Form, backend: str, up: Callable[..., UpRun], tmp_path: Path
) -> None:
    settings = (*write_task(tmp_path, form), *SETTINGS, f"learner.backend={backend}", "rollout.replicas=1")
    finish(up(f"agree_{form}_{backend}".replace("-", "_"), *settings), tmp_path)
