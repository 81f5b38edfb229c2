"""Features of vLLM that the adapter needs, looked for one by one.

Owns the list and the search. vLLM's versions differ in more than numbers. Must never compare version strings:
builds carry patches, and a name that is there can be used. Invariant: every missing feature is named at the
start of an engine, all of them at once, and not by the first swap that fails for lack of it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

from asyncrl.core.errors import EngineError


@dataclass(frozen=True)
class Feature:
    """One name in vLLM, and what a caller hands to it.

    Attributes:
        module: Where it is.
        name: A name in that module, dotted for an attribute of a class.
        takes: Parameters of the function, or fields of the class.
    """

    module: str
    name: str
    takes: tuple[str, ...] = ()


ENGINE = "vllm.v1.engine.async_llm"
TRANSFER = "vllm.distributed.weight_transfer"
RELOAD = "vllm.model_executor.model_loader.reload"
LAYERS = "vllm.model_executor.layers"
STATS = "vllm.v1.metrics.stats"
NEEDED = (
    Feature(ENGINE, "AsyncLLM.from_engine_args", ("stat_loggers",)),
    Feature(ENGINE, "AsyncLLM.generate", ("prompt", "sampling_params", "request_id")),
    Feature(ENGINE, "AsyncLLM.abort", ("request_id",)),
    Feature(ENGINE, "AsyncLLM.errored"),
    Feature(ENGINE, "AsyncLLM.pause_generation", ("mode", "clear_cache")),
    Feature(ENGINE, "AsyncLLM.resume_generation"),
    Feature(ENGINE, "AsyncLLM.start_weight_update"),
    Feature(ENGINE, "AsyncLLM.update_weights", ("request",)),
    Feature(ENGINE, "AsyncLLM.finish_weight_update"),
    Feature(ENGINE, "AsyncLLM.update_weight_version", ("new_version",)),
    Feature(ENGINE, "AsyncLLM.collective_rpc", ("method",)),
    Feature(
        "vllm.engine.arg_utils",
        "AsyncEngineArgs",
        ("logprobs_mode", "weight_transfer_config", "worker_extension_cls"),
    ),
    Feature("vllm.v1.metrics.loggers", "PrometheusStatLogger"),
    Feature(STATS, "SchedulerStats", ("num_running_reqs", "num_waiting_reqs", "kv_cache_usage")),
    Feature(STATS, "PromptTokenStats", ("total", "local_cache_hit")),
    Feature("vllm.outputs", "CompletionOutput", ("weight_versions",)),
    Feature(
        "vllm.sampling_params",
        "SamplingParams",
        (
            "logprobs",
            "flat_logprobs",
            "detokenize",
            "output_kind",
            "seed",
            "ignore_eos",
            "skip_clone",
            "stop",
        ),
    ),
    Feature("vllm.sampling_params", "RequestOutputKind.FINAL_ONLY"),
    Feature("vllm.exceptions", "VLLMValidationError"),
    Feature("vllm.v1.engine.exceptions", "EngineDeadError"),
    Feature("vllm.v1.engine.exceptions", "EngineGenerateError"),
    Feature(f"{TRANSFER}.factory", "WeightTransferEngineFactory.register_engine"),
    Feature(f"{TRANSFER}.base", "WeightTransferUpdateRequest", ("update_info",)),
    Feature(f"{TRANSFER}.base", "WeightTransferEngine.start_weight_update"),
    Feature(f"{TRANSFER}.base", "WeightTransferEngine.update_weights", ("update_info",)),
    Feature(f"{TRANSFER}.base", "WeightTransferEngine.finish_weight_update"),
    Feature(RELOAD, "initialize_layerwise_reload", ("model",)),
    Feature(RELOAD, "finalize_layerwise_reload"),
    Feature(f"{RELOAD}.layerwise", "get_layerwise_info"),
    Feature("vllm.v1.core.sched.scheduler", "Scheduler.set_pause_state", ("pause_state",)),
    Feature("vllm.v1.core.sched.interface", "PauseState.UNPAUSED"),
    Feature("vllm.v1.core.block_pool", "BlockPool"),
    Feature("vllm.v1.core.kv_cache_utils", "KVCacheBlock.reset_hash"),
    Feature(f"{RELOAD}.types", "LayerReloadingInfo", ("loaded_weights",)),
    Feature(f"{RELOAD}.types", "LayerReloadingInfo.can_load"),
    Feature(f"{LAYERS}.linear", "UnquantizedLinearMethod"),
    Feature(f"{LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    Feature("vllm.distributed.parallel_state", "get_world_group"),
    Feature("vllm.forward_context", "set_forward_context", ("attn_metadata", "vllm_config", "num_tokens")),
    Feature(f"{LAYERS}.attention", "Attention"),
    Feature(f"{LAYERS}.attention", "ChunkedLocalAttention"),
    Feature(f"{LAYERS}.attention_layer_base", "AttentionLayerBase"),
)


def check_features(needed: Iterable[Feature] = NEEDED) -> None:
    """Return if this vLLM has all of `needed`.

    Raises:
        EngineError: vLLM is not installed, or lacks some of it; all that is missing is named.
    """
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise EngineError(
            f"vllm cannot be imported: {error}", hint="`asyncrl doctor` prints the command that installs it"
        ) from error
    missing = [name for feature in needed for name in find_missing(feature)]
    if missing:
        raise EngineError(f"this vllm has no {', '.join(missing)}", hint="Install vllm 0.32")


def find_missing(feature: Feature) -> Iterator[str]:
    """Yield what of `feature` is not there, as it is written in code."""
    where = f"{feature.module}.{feature.name}"
    try:
        module = importlib.import_module(feature.module)
        found = reduce(getattr, feature.name.split("."), module)
    except (ImportError, AttributeError):
        yield where
        return
    known = _names_of(found)
    yield from (f"{where}({name})" for name in feature.takes if name not in known)


def _names_of(found: object) -> set[str]:
    """Return the parameters of a function, or the fields of a class that is a struct of any kind."""
    fields = {*getattr(found, "__annotations__", {}), *getattr(found, "__struct_fields__", ())}
    if not callable(found):
        return fields
    try:
        return fields | set(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return fields
