"""Random models of the studies, with a tokenizer and an adapter, and prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from asyncrl.core.config.tree import LoraSection
from asyncrl.models.weight_files import read_shapes
from benchmarks.learner.inputs import save_qwen3
from learner.lora.folder import save_adapter
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
from weight_sync.encoding.low_rank import factor_shapes

NARROW = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
WIDTHS = {"narrow": NARROW | {"head_dim": 32}, "wide": WIDE | {"head_dim": 64}}
VOCAB_SIZE = 4096
STD = 0.06
"""Of random weights: with the usual 0.02 distributions of such a model are even."""
LORA = LoraSection(rank=32, alpha=64.0)


def save(folder: Path, width: str, num_layers: int) -> Path:
    """Write a Qwen3 and return its folder."""
    sizes: dict[str, Any] = {**WIDTHS[width], "num_hidden_layers": num_layers, "vocab_size": VOCAB_SIZE}
    save_qwen3(folder, initializer_range=STD, tie_word_embeddings=False, **sizes)
    build_tokenizer().save_pretrained(folder)
    return folder


def save_factors(model: Path, folder: Path) -> Path:
    """Write an adapter of `LORA` to `model`, of which no factor is zero, and return its folder."""
    generator = torch.Generator().manual_seed(0)
    shapes = factor_shapes(read_shapes(model), LORA)
    factors = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    save_adapter(str(model), folder, factors.items(), LORA)
    return folder


def make_prompts(number: int, seed: int) -> list[list[int]]:
    """Return prompts of 8 to 59 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 60, (number,), generator=generator).tolist()
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
