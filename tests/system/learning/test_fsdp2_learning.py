"""The demo on the second backend, and with experts: it learns through `asyncrl up`, the account is clean."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout_service.tasks.digit_sort.vocabulary import BOS, EOS, PAD, VOCABULARY
from rollout_service.tasks.digit_sort.warm_start import train_warm_start
from tests.rollout.engine.engine_parts import save_model
from tests.system.parts.up_run import UpRun, asyncrl_command

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


def test_the_demo_learns_with_the_experts_that_were_chosen_in_generation(
    up: Callable[..., UpRun], tmp_path: Path
) -> None:
    """Two ranks share the experts, versions change in flight: some are not those of today's weights."""
    save_model(train_warm_start(0, WARM_UP_STEPS, [], build=build_mixture).model, tmp_path)
    ranks = "learner.dp=2", "learner.ep=2", "learner.cpus=0.5"
    run = up("replayed", f"model.path={tmp_path}", *ranks, "rollout.router_replay=r3", *SHORTER)
    check_it_learns(run)
    rows = run.rows()
    assert all(row["actor/router_unrecorded"] == 0 for row in rows), "no prompt fills a block of the cache"
    assert 0 < statistics.mean(row["actor/router_flip_rate"] for row in rows) < 0.2


def test_without_lag_routers_choose_what_the_engine_s_did_and_a_recorded_run_trains_again_bit_by_bit(
    up: Callable[..., UpRun], tmp_path: Path
) -> None:
    save_model(build_mixture(0), tmp_path)
    run = up(
        "synchronous",
        f"model.path={tmp_path}",
        *("rollout.router_replay=r3", "rollout.replicas=1", "run.record=true", "eval.every_steps=0"),
        *("staleness.max_lag=0", "learner.minibatches=1", "learner.steps=10", "checkpoint.every_steps=5"),
    )
    code, output = run.finish()
    assert code == 0, output
    rows = run.rows()
    assert [row["actor/router_unrecorded"] for row in rows] == [0.0] * 10
    assert max(row["actor/router_flip_rate"] for row in rows) < 1e-3, "ties alone"
    assert statistics.median(row["actor/router_flip_rate"] for row in rows) == 0
    command = asyncrl_command("replay", run.folder.name, "--dir", str(run.runs_dir), "--from", "6", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["is_exact"] and [step["step"] for step in found["steps"]] == [5, 6, 7, 8, 9]


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
