"""Inputs of benchmarks: randomly initialised models and made-up trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.core.experience import Trajectory
from asyncrl.core.staleness import Span
from asyncrl.models.named_models import NAMED_MODELS
from learner.batching.batch import PackedBatch

_SIZES = ("0.6B", "1.7B", "4B", "8B")
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_TINY |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "tie_word_embeddings": True}
QWEN3: Mapping[str, Mapping[str, Any]] = {
    **{size: NAMED_MODELS[f"Qwen/Qwen3-{size}"] for size in _SIZES},
    "tiny": _TINY,
}
"""Fields of `transformers.Qwen3Config` by size; `tiny` is for a CPU."""


def save_qwen3(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **fields: Any) -> int:
    """Write a Qwen3 with seeded random weights and return the number of its parameters.

    Args:
        device: Where the weights are drawn; billions of draws take minutes on a CPU.
        fields: Of `transformers.Qwen3Config`.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**fields), dtype=dtype)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_trajectory(generator: np.random.Generator, num_tokens: int, vocab_size: int) -> Trajectory:
    """Return a trajectory of uniform token ids, sampled by version 1, with a normal reward."""
    return Trajectory(
        response_ids=generator.integers(0, vocab_size, num_tokens).astype(np.int32),
        loss_mask=np.ones(num_tokens, np.uint8),
        logprobs=np.zeros(num_tokens, np.float32),
        spans=(Span(1, 0, num_tokens),),
        reward=float(generator.standard_normal()),
        finish_reason="stop",
    )


def loss(
    logprobs_N: torch.Tensor, entropy_N: torch.Tensor, microbatch: PackedBatch
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return the policy gradient with the reward as advantage, and a little entropy, token-mean."""
    rewards_N = microbatch.rewards_R[microbatch.row_N]
    per_token_N = -(rewards_N * logprobs_N + 0.01 * entropy_N) * microbatch.loss_mask_N
    total = per_token_N.sum() / microbatch.totals.num_tokens
    return total, {"actor/pg_loss": total.detach()}


def save_plain(folder: Path, hidden_size: int, num_layers: int, vocab_size: int) -> int:
    """Write a Qwen3 whose embedding and output projection are separate; return its number of parameters."""
    return save_qwen3(
        folder,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def save_qwen3_moe(
    folder: Path,
    hidden_size: int,
    num_layers: int,
    vocab_size: int,
    num_experts: int,
    num_experts_per_tok: int,
) -> int:
    """As `save_plain`, with experts as wide as half of a dense layer; return the number of parameters."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        moe_intermediate_size=3 * hidden_size // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        head_dim=64,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
