"""Adapters of the tests: a folder with random factors, as PEFT writes them."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.files.weight_files import read_shapes
from learner.lora.folder import save_adapter
from weight_sync.encoding.low_rank import factor_shapes


def make_adapter(model: Path, folder: Path, seed: int = 0, std: float = 0.05, **changes) -> dict[str, object]:
    """Write an adapter to `model` whose A and B are random; return what `model.lora` says of it."""
    lora = LoraSection(**({"rank": 4, "alpha": 6.0} | changes))
    generator = torch.Generator().manual_seed(seed)
    shapes = factor_shapes(read_shapes(model), lora)
    factors = {name: torch.randn(shape, generator=generator) * std for name, shape in shapes.items()}
    save_adapter(str(model), folder, factors.items(), lora)
    return lora.model_dump() | {"path": str(folder)}
