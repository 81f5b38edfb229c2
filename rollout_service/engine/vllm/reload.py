"""Layer-wise reload of a model inside vLLM's workers, with all state that vLLM derives from weights.

vLLM processes weights after a load; on CPU it packs each matrix for oneDNN and computes with the packed
copy alone. Its reload processes again those modules that were given weights, but packs experts only when it
makes their kernel, which is therefore made anew. A module that holds another's parameter, as a tied head
does, has no tensor of its own in a checkpoint: it would compute with the packed copy of an older version. So
a load into a shared parameter is repeated for every module that holds it. Modules whose processing is not
known to be repeatable are refused when the engine starts.
Invariant: when `reload` returns, every module with parameters was given all of them and processed again.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerTensorOnlineLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.platforms import current_platform

from asyncrl.core.errors import SyncError
from asyncrl.core.runtime.faults import is_wanted
from rollout_service.engine.vllm.objects import HasModules, LoadableModel, LoadedParameter
from rollout_service.engine.vllm.quantized import Int8LinearMethod

# It warns at every load of the modules that have buffers only; `_find_missing` names what is really missing.
logging.getLogger(finalize_layerwise_reload.__module__).setLevel(logging.ERROR)

REPEATABLE = (
    UnquantizedLinearMethod,
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    Int8LinearMethod,
    Fp8PerTensorOnlineLinearMethod,
)
"""Kinds of processing whose result after a reload is that of a start with the same weights."""


@dataclass(frozen=True)
class Holder:
    """A module that holds a parameter: the module, its path in the model, the parameter's name in it."""

    module: torch.nn.Module
    path: str
    name: str

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def parameter(self) -> LoadedParameter:
        """The parameter as it is now: a reload replaces it for a while."""
        parameter: LoadedParameter = getattr(self.module, self.name)
        return parameter


Call = tuple[tuple[object, ...], dict[str, object]]
Calls = dict[Holder, list[Call]]
"""Arguments of each holder's weight loader, call by call."""


def find_shared(model: HasModules) -> list[list[Holder]]:
    """Return the holders of each parameter that several modules hold, in the order of the modules.

    During a reload nothing is shared: vLLM gives each module a parameter of its own until the end.
    """
    holders: defaultdict[int, list[Holder]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name in SKIP_LOAD_TENSORS:
                continue  # loaded where it lies, for all holders
            holders[id(parameter)].append(Holder(module, path, name))
    return [group for group in holders.values() if len(group) > 1]


def find_refused(model: HasModules, config: ModelConfig) -> Iterator[str]:
    """Yield, by module, why loads into `model` would not be right."""
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in REPEATABLE:
            yield f"'{path}' ({type(module).__name__}) is processed by {type(method).__name__}"
        elif method is None and type(module) not in REPEATABLE and _processes_itself(module):
            yield f"'{path}' ({type(module).__name__}) processes its weights in a way of its own"
        elif getattr(config, "quantization", None) and isinstance(method, UnquantizedFusedMoEMethod):
            yield f"'{path}' ({type(module).__name__}) has experts, which {config.quantization} leaves whole"
    yield from _find_overlaps(model)
    # Builds without this field tie whatever the checkpoint holds.
    if getattr(config, "word_embeddings_untied_by_checkpoint", False) and not find_shared(model):
        yield (
            "config.json says tie_word_embeddings, but the checkpoint has an 'lm_head.weight' that is not "
            "the embedding: the learner would train one tensor for both"
        )


def reload(model: LoadableModel, config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Overwrite the weights of `model` in place. Modules refer to `tensors` until this returns.

    Raises:
        SyncError: Parameters were given nothing. As after any other error, the model is neither old nor
            new then, and a next reload starts clean.
    """
    shared = find_shared(model)
    try:
        if current_platform.is_cpu():
            _drop_expert_kernels(model)
        initialize_layerwise_reload(model)
        with _noted_calls(shared) as calls:
            model.load_weights(tensors)
            if is_wanted("engine.unrepeated"):
                return  # as vLLM's own reload does: a tied head stays packed from older weights
            _repeat(shared, calls)
        if missing := list(_find_missing(model)):
            raise SyncError(f"the load brought nothing for the engine's parameters {missing[:5]}")
    finally:
        finalize_layerwise_reload(model, config)


def _drop_expert_kernels(model: HasModules) -> None:
    """Have vLLM make the kernels of experts anew, which on CPU is when it packs their weights.

    vLLM 0.32 with the kernel kept reads plain weights as packed ones (log-probs off by 1.8). On a GPU the
    weights are not packed, and graphs hold the kernel's addresses.
    """
    for _, module in model.named_modules():
        if isinstance(module, UnquantizedFusedMoEMethod):  # experts' methods are modules too
            module.moe_kernel = None


def _processes_itself(module: torch.nn.Module) -> bool:
    # vLLM has attention process itself at the end of every reload. It cannot load what it packs for AMX.
    is_packed = getattr(module, "is_amx_bmm_enabled", False)
    is_known = type(module) in (Attention, MLAAttention) and not is_packed
    return not is_known and callable(getattr(module, "process_weights_after_loading", None))


def _find_overlaps(model: HasModules) -> Iterator[str]:
    """Yield pairs of tensors of two modules that have memory in common without being one parameter."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    latent = {path for path, module in model.named_modules() if isinstance(module, MLAAttention)}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *model.named_buffers(remove_duplicate=False)):
        if not tensor.numel() or name.rpartition(".")[0] in latent:
            continue  # packed: the module keeps an empty tensor; or a view of `kv_b_proj`, made at each load
        other_name, other = first.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor))
        is_weight = isinstance(tensor, torch.nn.Parameter) or isinstance(other, torch.nn.Parameter)
        if other is not tensor and is_weight and name.rpartition(".")[0] != other_name.rpartition(".")[0]:
            yield f"'{name}' lies in the memory of '{other_name}'"


@contextmanager
def _noted_calls(shared: Sequence[Sequence[Holder]]) -> Iterator[Calls]:
    """Note within the block what the weight loaders of shared parameters are called with."""
    calls: Calls = {holder: [] for group in shared for holder in group}
    loaders = [(holder.parameter, holder.parameter.weight_loader) for holder in calls]
    for holder, (parameter, loader) in zip(calls, loaders, strict=True):
        parameter.weight_loader = _noting(loader, calls[holder])
    try:
        yield calls
    finally:
        for parameter, loader in loaders:  # vLLM keeps these parameters for its next reload
            parameter.weight_loader = loader


def _noting(loader: Callable[..., object], calls: list[Call]) -> Callable[..., object]:
    @functools.wraps(loader)  # with its name: vLLM wraps loaders of any other name once more
    def note(param: torch.Tensor, *args: object, **options: object) -> object:
        calls.append((args, options))
        return loader(param, *args, **options)

    return note


def _repeat(shared: Sequence[Sequence[Holder]], calls: Calls) -> None:
    """Load what one holder of a parameter was given into the other ones that were given nothing."""
    for group in shared:
        source = next((holder for holder in group if calls[holder]), None)
        if source is None:
            continue  # `_find_missing` names it
        for holder in [holder for holder in group if not calls[holder]]:
            parameter = holder.parameter
            for args, options in calls[source]:
                parameter.weight_loader(parameter, *args, **options)


def _find_missing(model: HasModules) -> Iterator[str]:
    """Yield the names of the parameters that were given nothing."""
    for path, module in model.named_modules():
        info = get_layerwise_info(module)
        if not info.can_load():
            continue  # complete, and processed already
        # Experts are stacked, many tensors in one parameter: nothing but the count tells whether all came.
        is_stacked = isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)
        given = set() if is_stacked else {name for name, _ in info.loaded_weights}
        for name, _ in module.named_parameters(recurse=False):
            if name not in given:
                yield Holder(module, path, name).full_name
