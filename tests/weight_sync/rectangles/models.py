"""Tiny models of four families: their Hugging Face configuration and the shapes of their checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.memory.manifest import TensorSpec

MOE = "qwen3_moe"
CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    MOE: "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True)
class Model:
    """Sizes of a model; `num_experts` of Qwen3-MoE alone."""

    family: str
    is_tied: bool = False
    vocab_size: int = 1003
    hidden: int = 64
    intermediate: int = 96
    num_layers: int = 2
    num_heads: int = 8
    num_groups: int = 2
    head_size: int = 16
    num_experts: int = 8
    expert_width: int = 32

    @property
    def has_experts(self) -> bool:
        return self.family == MOE

    def config(self) -> dict[str, Any]:
        """Return its `config.json`."""
        experts = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": self.expert_width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return {
            "model_type": self.family,
            "architectures": [CLASSES[self.family]],
            "tie_word_embeddings": self.is_tied,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_groups,
            "head_dim": self.head_size,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **(experts if self.has_experts else {}),
        }

    def specs(self) -> list[TensorSpec]:
        """Return the tensors of its checkpoint."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden)}
        for layer in range(self.num_layers):
            shapes |= self._layer(f"model.layers.{layer}.")
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.is_tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden)
        return [TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()]

    def _layer(self, prefix: str) -> dict[str, tuple[int, ...]]:
        wide, narrow = self.num_heads * self.head_size, self.num_groups * self.head_size
        rows = {"q": wide, "k": narrow, "v": narrow}
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}{norm}_layernorm.weight": (self.hidden,) for norm in ("input", "post_attention")
        }
        attention = f"{prefix}self_attn."
        shapes |= {f"{attention}{part}_proj.weight": (count, self.hidden) for part, count in rows.items()}
        shapes[f"{attention}o_proj.weight"] = (self.hidden, wide)
        if self.family == "qwen2":
            shapes |= {f"{attention}{part}_proj.bias": (count,) for part, count in rows.items()}
        if self.family.startswith("qwen3"):
            shapes |= {f"{attention}{part}_norm.weight": (self.head_size,) for part in "qk"}
        mlps = {f"{prefix}mlp.": self.intermediate}
        if self.has_experts:
            shapes[f"{prefix}mlp.gate.weight"] = (self.num_experts, self.hidden)
            mlps = {f"{prefix}mlp.experts.{e}.": self.expert_width for e in range(self.num_experts)}
        for mlp, width in mlps.items():
            shapes |= {f"{mlp}{part}_proj.weight": (width, self.hidden) for part in ("gate", "up")}
            shapes[f"{mlp}down_proj.weight"] = (self.hidden, width)
        return shapes

    def checkpoint(self, seed: int = 7) -> dict[str, torch.Tensor]:
        """Return random tensors."""
        generator = torch.Generator().manual_seed(seed)
        return {spec.name: torch.randn(spec.shape, generator=generator).bfloat16() for spec in self.specs()}
