"""The demo on the second backend, and with experts: it learns through `asyncrl up`, the account is clean."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout_service.tasks.digit_sort.vocabulary import BOS, EOS, PAD, VOCABULARY
from rollout_service.tasks.digit_sort.warm_start import train_warm_start
from tests.rollout.engine.engine_parts import save_model
from tests.system.parts.up_run import UpRun

pytestmark = pytest.mark.long
NUM_STEPS, WARM_UP_STEPS = 150, 700
SHORTER = (f"learner.steps={NUM_STEPS}", "eval.every_steps=50")


def test_the_demo_learns_on_fsdp2(up: Callable[..., UpRun]) -> None:
    check_it_learns(up("fsdp2", "learner.backend=fsdp2", *SHORTER))


def test_the_demo_learns_with_experts_that_two_ranks_share(up: Callable[..., UpRun], tmp_path: Path) -> None:
    save_model(train_warm_start(0, WARM_UP_STEPS, [], build=build_mixture).model, tmp_path)
    run = up(
        "experts", f"model.path={tmp_path}", "learner.dp=2", "learner.ep=2", "learner.cpus=0.5", *SHORTER
    )
    check_it_learns(run)
    assert all(1 <= row["actor/expert_load_max"] <= 4 for row in run.rows())


def build_mixture(seed: int) -> Qwen3MoeForCausalLM:
    """Return the builtin model with eight experts, of which each token meets two, in its layers."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )
    return Qwen3MoeForCausalLM(config)


def check_it_learns(run: UpRun) -> None:
    code, output = run.finish()
    assert code == 0, output
    rewards = [row["critic/rewards/mean"] for row in run.rows()]
    assert len(rewards) == NUM_STEPS
    assert statistics.mean(rewards[:10]) < 0.2
    assert statistics.mean(rewards[-10:]) > 0.5
    assert run.summary()["ledger_residue"] == 0
    assert max(row["staleness/lag_max_trained"] for row in run.rows()) <= 4
