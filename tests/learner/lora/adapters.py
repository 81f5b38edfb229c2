"""Adapters of the tests: a folder with random factors, as PEFT writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from asyncrl.core.config.tree import LoraSection
from asyncrl.models.weight_files import read_shapes
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


def in_peft(model, batch):
    """Return the log-probs of each row alone, by PEFT's model."""
    found = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        table = model(batch.tokens_N[None, start:end]).logits[0].log_softmax(-1)
        found.append(table.gather(-1, batch.labels_N[start:end, None])[:, 0])
    return torch.cat(found)


def load_peft(model, folder):
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    return PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
