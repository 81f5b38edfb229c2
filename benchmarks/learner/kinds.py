"""Models that whole training steps are measured on, dense, with experts or adapters, and the plain step.

That is one as one would write it: Hugging Face's model pads to the longest row, its experts run by grouped
products, its adapters are PEFT's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional

from asyncrl.core.config.tree import LearnerSection, LoraSection
from asyncrl.models.weight_files import read_shapes
from benchmarks.learner.inputs import save_plain, save_qwen3_moe
from learner.backend import Placement
from learner.batching.batch import PackedBatch
from learner.lora.factors import NO_ADAPTERS
from learner.lora.folder import save_adapter
from learner.megatron.backend import MegatronBackend
from weight_sync.encoding.low_rank import factor_shapes

GRAD_CLIP, LR, BETAS, EPSILON = 1.0, 1e-5, (0.9, 0.999), 1e-8
RANK, ALPHA = 16, 32.0
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
TARGETS: Mapping[str, Mapping[str, float]] = {
    "dense": {"equal": 1.1, "ragged": 1.5},
    "experts": {"equal": 1.0, "ragged": 1.5},
    "adapters": {"equal": 1.0, "ragged": 1.5},
}
"""Tokens per second of processor time over the hand-written step's, by kind and lengths of rows."""
Step = Callable[[], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Qwen3 with separate embedding and output projection, and how often it is measured."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_turns: int
    kind: Literal["dense", "experts", "adapters"] = "dense"


class Model:
    """The folder of a shape, with random weights, and of its adapter if it has one."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self._folder, self._adapter, self._shape = folder / "model", folder / "adapter", shape
        sizes = (shape.hidden_size, shape.num_layers, shape.vocab_size)
        if shape.kind == "experts":
            self.num_parameters = save_qwen3_moe(self._folder, *sizes, **EXPERTS)
        else:
            self.num_parameters = save_plain(self._folder, *sizes)
        self._lora = self._save_adapter() if shape.kind == "adapters" else NO_ADAPTERS

    def _save_adapter(self) -> LoraSection:
        """Write factors of which none is zero: both sides begin with them."""
        lora = LoraSection(rank=RANK, alpha=ALPHA)
        generator = torch.Generator().manual_seed(0)
        shapes = factor_shapes(read_shapes(self._folder), lora)
        factors = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
        save_adapter(str(self._folder), self._adapter, factors.items(), lora)
        return lora.model_copy(update={"path": str(self._adapter)})

    def open(self) -> MegatronBackend:
        """Return the learner."""
        section = LearnerSection(lr=LR, betas=BETAS, grad_clip=GRAD_CLIP)
        return MegatronBackend(self._folder, section, Placement(), dtype="float32", lora=self._lora)

    def make_plain_step(self, batch: PackedBatch) -> Step:
        """Return a step as one would write it: Hugging Face, padded rows, AdamW; the same loss."""
        model = self._load_plain()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True)
        tokens_BT, labels_BT, weight_BT, is_real_BT = pad_batch(batch)
        # Rows of one length need no mask, and attention without one is faster.
        attention_mask = None if is_real_BT.all() else is_real_BT.long()

        def step() -> dict[str, float]:
            optimizer.zero_grad()
            logits = model(input_ids=tokens_BT, attention_mask=attention_mask, use_cache=False).logits
            minus_logprobs = functional.cross_entropy(
                logits.flatten(0, 1), labels_BT.flatten(), reduction="none"
            )
            total = (minus_logprobs * weight_BT.flatten()).sum()
            total.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(trained, GRAD_CLIP)
            optimizer.step()
            return {"actor/pg_loss": total.item(), "actor/grad_norm": grad_norm.item()}

        return step

    def _load_plain(self) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).train()
        if self._shape.kind == "experts":
            model.set_experts_implementation("grouped_mm")
        if self._shape.kind == "adapters":
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(self._adapter), is_trainable=True)
        return model


def pad_batch(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, labels, weight of each label's log-prob, and which positions are real, all [B, T]."""
    weight_N = batch.rewards_R[batch.row_N] * batch.loss_mask_N / batch.totals.num_tokens
    spans = list(itertools.pairwise(batch.cu_seqlens))

    def pad(values_N: torch.Tensor) -> torch.Tensor:
        rows = [values_N[start:end] for start, end in spans]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    is_real_N = torch.ones(batch.num_tokens, dtype=torch.bool)
    return pad(batch.tokens_N), pad(batch.labels_N), pad(weight_N), pad(is_real_N)
