"""Tiny models of the families that are trained and served, in every form that an engine treats differently.

A seed decides every tensor of a model by a generator of its own; no other random state takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from rollout_service.tasks.digit_sort.vocabulary import BOS, EOS, PAD
from tests.rollout.engine.engine_parts import Change, LoopThread, save_model, stage
from weight_sync.memory.manifest import Probe

CONFIGS: dict[str, Callable[..., LlamaConfig | Qwen2Config | Qwen3Config]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,  # its q, k and v have biases
    "qwen3": Qwen3Config,  # its q and k have norms
}
MIXTURES: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen3_moe": partial(
        Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    ),
    "mixtral": partial(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": partial(OlmoeConfig, num_experts=4, num_experts_per_tok=2),
}
"""Families whose layers choose two of four experts for each token: an answer meets all of them."""
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 48}
"""Sizes of latent attention: vLLM's kernel for decoding on a CPU knows 512 + 64 alone."""
SHARED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
"""Layers whose router keeps to two of four groups, with shared experts beside; the first layer is dense."""
GROUPED: dict[str, Callable[..., PreTrainedConfig]] = {
    "glm4_moe": partial(Glm4MoeConfig, use_qk_norm=True, attention_bias=True, **SHARED),
    "deepseek_v2": partial(
        DeepseekV2Config, q_lora_rank=None, topk_method="group_limited_greedy", **SHARED, **LATENT
    ),
    "deepseek_v3": partial(
        DeepseekV3Config, q_lora_rank=40, topk_method="noaux_tc", scoring_func="sigmoid", **SHARED, **LATENT
    ),
}
OTHERS: dict[str, Callable[..., PreTrainedConfig]] = {
    "mistral": partial(MistralConfig, sliding_window=None),
    "phi3": Phi3Config,
    "gemma": GemmaConfig,
    "gemma2": partial(Gemma2Config, sliding_window=16, query_pre_attn_scalar=32),
    "gemma3_text": partial(Gemma3TextConfig, sliding_window=16, query_pre_attn_scalar=32),
    "olmo2": Olmo2Config,
    "granite": partial(GraniteConfig, logits_scaling=2.0, embedding_multiplier=3.0),
}
"""Further dense ones, for the table of families."""
SHARE_HIDDEN = frozenset({"qwen2", "olmoe", "phi3", "olmo2", "granite", "deepseek_v2", "deepseek_v3"})
"""Whose heads share out the hidden size."""
CENTRED = "gemma"
"""Whose norms multiply by one more than their weight."""
VOCABULARIES = (87, 96, 128, 131, 151_936)
"""The engine pads to multiples of 64; the last one is Qwen's."""
SPREAD = 0.15


@dataclass(frozen=True)
class Width:
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_size: int


PLAIN = Width(64, 192, 2, 1, 32)
WIDTHS = (PLAIN, Width(160, 136, 2, 2, 80), Width(128, 44, 4, 2, 32), Width(72, 70, 2, 2, 32))
"""Qwen2's heads share out its hidden size: it has no form of the last one.

The norms of vLLM 0.32 on CPU take only hidden sizes that are multiples of eight.
"""


@dataclass(frozen=True)
class Form:
    """What of a model decides how an engine loads it."""

    family: str
    is_tied: bool
    vocab_size: int
    width: Width = PLAIN

    def __str__(self) -> str:
        tied = "tied" if self.is_tied else "untied"
        return f"{self.family}-{tied}-{self.vocab_size}-{self.width.hidden}"

    def build(self, seed: int) -> PreTrainedModel:
        """Return the model of `seed`, in float32."""
        width = self.width
        config = (CONFIGS | MIXTURES | GROUPED | OTHERS)[self.family](
            vocab_size=self.vocab_size,
            hidden_size=width.hidden,
            intermediate_size=width.intermediate,
            num_hidden_layers=2,
            num_attention_heads=width.heads,
            num_key_value_heads=width.heads if self.family.startswith("deepseek") else width.key_value_heads,
            **({} if self.family in SHARE_HIDDEN else {"head_dim": width.head_size}),
            max_position_embeddings=1024,
            tie_word_embeddings=self.is_tied,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            dtype="float32",
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            saved = model.state_dict().keys()
            buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
            for name, parameter in (*model.named_parameters(), *buffers):
                middle = 1.0 if "norm" in name and not self.family.startswith(CENTRED) else 0.0
                parameter.copy_(middle + SPREAD * torch.randn(parameter.shape, generator=generator))
        return model


def start_engine(
    model: PreTrainedModel,
    folder: Path,
    loop: LoopThread,
    workers: int = 1,
    dtype: str = "float32",
    **changes: Any,
) -> VllmEngine:
    """Return an engine that was started with `model`. Without a tokenizer vLLM loads no Llama."""
    save_model(model, folder)
    settings = VllmSettings(str(folder), dtype, 1024, 16, 64 << 20, cpu_workers=workers, **changes)
    engine = VllmEngine(settings)
    try:
        loop.call(engine.start(), 280.0)
    except BaseException:
        loop.call(engine.shutdown())
        raise
    return engine


def swap(
    engine: VllmEngine,
    loop: LoopThread,
    number: int,
    model: PreTrainedModel,
    probe: Probe | None = None,
    change: Change = list,
) -> None:
    with stage(model, PolicyVersion(number, number), probe, change) as staged:
        loop.call(engine.swap(staged))
