"""Inputs of benchmarks: randomly initialised models and made-up trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.core.experience import Trajectory
from asyncrl.core.staleness import Span


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
