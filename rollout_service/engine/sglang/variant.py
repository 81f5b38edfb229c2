"""`rollout.engine: sglang`: its record, and how a replica gets one. Imports no SGLang: `plan` reads it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asyncrl.core.config.gpus import memory_share
from asyncrl.core.config.tree import Config
from rollout_service.engine.protocol import Engine, EngineVariant
from rollout_service.engine.sglang import windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SglangVariant(EngineVariant):
    """SGLang."""

    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
        from rollout_service.engine.sglang.engine import SglangEngine, SglangSettings

        rollout = config.rollout
        return SglangEngine(
            SglangSettings(
                model=config.model.path,
                dtype=config.model.dtype,
                max_model_tokens=config.data.max_prompt_tokens + rollout.max_tokens,
                max_sequences=rollout.max_sequences,
                kv_cache_bytes=rollout.kv_cache_bytes,
                has_stops=bool(rollout.stop),
                serves_agents=rollout.gateway is not None,
                recomputes_kv_cache=rollout.kv_cache == "recompute",
                num_gpus=math.ceil(rollout.gpus),
                memory_share=memory_share(rollout.gpus),
                seed=config.run.seed,
                engine_args=rollout.engine_args,
            ),
            tokenizer,
        )


_WEIGHTS = "weight sync loads the weights of each version"
_PROBABILITIES = "log-probs must be those of the trained weights, as sampled"
OWNED_ARGS = {
    **dict.fromkeys(
        ("model_path", "tokenizer_path", "tokenizer_mode", "served_model_name", "json_model_override_args"),
        "a replica serves the model and the tokenizer of model.path",
    ),
    "revision": "it stands behind model.path",
    "trust_remote_code": "no code is taken from a model folder",
    "dtype": "it is model.dtype",
    "random_seed": "it is run.seed",
    "context_length": "it is data.max_prompt_tokens + rollout.max_tokens",
    "max_running_requests": "it is rollout.max_sequences",
    "disable_radix_cache": "prefixes of older weights would be found after a swap",
    "quantization": "it is rollout.quantization",
    "enable_deterministic_inference": "seeds count in this mode alone",
    "incremental_streaming_output": "the gateway reads answers in parts",
    **dict.fromkeys(
        ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes", "node_rank", "device", "base_gpu_id"),
        "a replica is one engine on rollout.gpus",
    ),
    **dict.fromkeys(("load_format", "custom_weight_loader", "enable_memory_saver"), _WEIGHTS),
    **dict.fromkeys(
        (
            "lora_paths",
            "enable_lora",
            "speculative_algorithm",
            "enable_custom_logit_processor",
        ),
        _PROBABILITIES,
    ),
}
"""By SGLang 0.5's names. The rest, and `python`, is the user's."""

VARIANT = SglangVariant(
    "SGLang",
    loads_model=True,
    has_gateway=True,
    owned_args=OWNED_ARGS,
    owned_args_on_cpu={
        "max_total_tokens": "it is rollout.kv_cache_bytes",
        "attention_backend": "a CPU has one",
        "sampling_backend": "a CPU has one",
    },
    logprob_tolerance=1e-5,
    environment="sglang",
    core_bytes=2100 * 10**6,
    one_gpu="loads and probes run in one of its processes, and could not be judged on all at once",
    unfit_model=f"{windows.__name__}:find_ignored_window",
)
