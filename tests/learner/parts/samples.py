"""Tiny models and groups for the tests of the learner."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.experts import Rows, no_expert
from asyncrl.core.staleness import Span

MIXTURES = ("qwen3_moe", "mixtral", "olmoe")
DENSE = ("qwen2", "qwen2_tied", "qwen3", "llama", "llama_stretched", "mistral", "phi3", "gemma")
KINDS = (*DENSE, *MIXTURES)


def save_model(
    folder: Path, kind: str = "qwen3", vocab_size: int = 131, seed: int = 0, num_layers: int = 2
) -> Path:
    """Write a small randomly initialised model of `kind`; nothing in it is zero or one."""
    from transformers import (
        AutoModelForCausalLM,
        GemmaConfig,
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
        OlmoeConfig,
        Phi3Config,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind in ("qwen2_tied", "gemma"),
    }
    stretched = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    no_padding = {"pad_token_id": None}  # whose embedding would have no gradient
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    }
    config = {
        "qwen3_moe": lambda: Qwen3MoeConfig(**sizes, **experts, head_dim=32),  # weights do not sum to one
        "mixtral": lambda: MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2),
        "olmoe": lambda: OlmoeConfig(
            **sizes, num_experts=4, num_experts_per_tok=2, pad_token_id=None, eos_token_id=None
        ),
        "qwen2": lambda: Qwen2Config(**sizes),
        "qwen2_tied": lambda: Qwen2Config(**sizes),
        "qwen3": lambda: Qwen3Config(**sizes, head_dim=32),
        "llama": lambda: LlamaConfig(**sizes),
        "mistral": lambda: MistralConfig(**sizes, head_dim=32, sliding_window=None),
        "phi3": lambda: Phi3Config(**sizes, **no_padding),
        "gemma": lambda: GemmaConfig(**sizes, **no_padding, head_dim=32),
        "llama_stretched": lambda: LlamaConfig(**sizes, rope_parameters=stretched),
    }[kind]()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.1 if name.endswith("bias") else 0.08)
    model.save_pretrained(folder)
    return folder


def make_trajectory(
    generator: np.random.Generator, num_tokens: int, vocab_size: int, versions: tuple[int, ...] = (1,)
) -> Trajectory:
    """Make an episode whose tokens were sampled by `versions`, in equal parts."""
    bounds = [num_tokens * part // len(versions) for part in range(len(versions) + 1)]
    runs = zip(versions, bounds[:-1], bounds[1:], strict=True)
    return Trajectory(
        response_ids=generator.integers(0, vocab_size, num_tokens).astype(np.int32),
        loss_mask=(generator.random(num_tokens) < 0.9).astype(np.uint8),
        logprobs=generator.normal(-3.0, 0.5, num_tokens).astype(np.float32),
        spans=tuple(Span(version, start, end) for version, start, end in runs if end > start),
        reward=float(generator.integers(0, 2)),
        finish_reason="stop",
    )


def make_groups(
    num_groups: int = 4,
    group_size: int = 4,
    *,
    seed: int = 0,
    vocab_size: int = 131,
    max_tokens: int = 24,
    versions: tuple[int, ...] = (1,),
    baseline_reward: float | None = None,
    prompt_tokens: tuple[int, int] = (2, 7),
) -> list[Group]:
    """Make groups with tickets 10, 11, ... and answers of 1..max_tokens tokens.

    Args:
        prompt_tokens: The fewest of a prompt, and one more than the most.
    """
    generator = np.random.default_rng(seed)
    groups = []
    for index in range(num_groups):
        prompt_ids = generator.integers(0, vocab_size, int(generator.integers(*prompt_tokens))).astype(
            np.int32
        )
        trajectories = tuple(
            make_trajectory(generator, int(generator.integers(1, max_tokens + 1)), vocab_size, versions)
            for _ in range(group_size)
        )
        groups.append(Group(10 + index, 0, prompt_ids, trajectories, baseline_reward))
    return groups


def make_forked_group(ticket: int, seed: int = 0, vocab_size: int = 131) -> Group:
    """Make a group of two episodes: one of three turns whose second is tried twice, and one of a single turn.

    The three rows of the first share the first turn, two of them a second; rewards are all different.
    """
    generator = np.random.default_rng(seed)
    prompt_ids, *turns = (generator.integers(0, vocab_size, 80).astype(np.int32) for _ in range(5))
    ends = [turns[:1], turns[:3], [turns[0], turns[1], turns[3]], [turns[2]]]
    rows = [np.concatenate(parts) for parts in ends]
    trajectories = tuple(
        replace(make_trajectory(generator, len(row), vocab_size), response_ids=row, reward=float(number + 1))
        for number, row in enumerate(rows)
    )
    return Group(ticket, 0, prompt_ids, trajectories, forked=(0, 0, 0, 1))


def route_groups(groups: Sequence[Group]) -> list[Group]:
    """Return groups that were sampled by two layers of experts, the second of which has none."""
    row = np.array([[0, 1], [no_expert(1)] * 2], np.uint8)

    def routed(num_tokens: int) -> Rows:
        return np.broadcast_to(row, (num_tokens, *row.shape))

    return [
        replace(
            group,
            prompt_experts=routed(len(group.prompt_ids)),
            trajectories=tuple(replace(one, experts=routed(one.num_tokens)) for one in group.trajectories),
        )
        for group in groups
    ]
