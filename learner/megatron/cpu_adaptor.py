"""CPU adaptor: runs the unmodified Megatron-core 0.16 on a machine without CUDA.

Owns: the name `torch` inside modules of `megatron.core`, which it rebinds to a stand-in whose
factories put "cuda" tensors on the CPU and whose `torch.cuda` does nothing. Must never change torch
itself: other code in the process sees the real module. Invariant: with CUDA present nothing happens.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "rand",
    "randn",
    "as_tensor",
    "empty_like",
    "zeros_like",
)
_MODULES = (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel.random",
)
_RNG_LOGGER = "megatron.core.tensor_parallel.random"


def is_installed() -> bool:
    """Tell whether Megatron-core of this process computes on the CPU."""
    engine = sys.modules.get("megatron.core.optimizer")
    return engine is not None and isinstance(vars(engine).get("torch"), _TorchOnCpu)


def install() -> None:
    """Import Megatron-core and, without CUDA, make it run on the CPU. Safe to call twice."""
    if not torch.cuda.is_available():
        # Megatron's jit_fuser is torch.compile and is bound at import; a compile on CPU costs minutes.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about Transformer Engine and Apex being absent
        for name in _MODULES:
            importlib.import_module(name)
    # Routers of 0.16.1 ask for it without Transformer Engine too.
    vars(importlib.import_module("megatron.core.transformer.moe.moe_utils")).setdefault("te_general_gemm")
    if torch.cuda.is_available():
        return
    fused = importlib.import_module("megatron.core.fusions.fused_bias_dropout").bias_dropout_add_fused_train
    assert not hasattr(fused, "_torchdynamo_orig_callable"), (
        "Megatron was imported before TORCHDYNAMO_DISABLE=1 was set: it would compile on the CPU"
    )
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("megatron.core") and m is not None]
    unadapted = [module for module in modules if module.__dict__.get("torch") is torch]
    if unadapted:
        stand_in, of_experts = _TorchOnCpu(_CudaOfCpu()), _TorchOnCpu(_CudaWithoutStreams())
        for module in unadapted:
            module.__dict__["torch"] = of_experts if ".moe." in module.__name__ else stand_in
        _rebind_rng()
        _rebind_token_counts()


@contextlib.contextmanager
def cuda_type_names(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Within the block `parameter.type()` answers as on CUDA; Megatron's optimizer compares those strings.

    The answer is an attribute of the given parameters alone and is removed at the end.
    """
    adapted = [p for p in parameters if not p.is_cuda]
    for parameter in adapted:
        name = torch.Tensor.type(parameter).replace("torch.", "torch.cuda.")
        parameter.type = functools.partial(str, name)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for parameter in adapted:
            del parameter.type


class _TorchOnCpu(types.ModuleType):
    """Stand-in that modules of `megatron.core` see as `torch`."""

    def __init__(self, cuda: _CudaOfCpu) -> None:
        super().__init__("torch")
        # A copy of the names: a lookup costs what it costs in the real module.
        self.__dict__.update(
            {name: value for name, value in vars(torch).items() if not name.startswith("__")}
        )
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))
        self.cuda = cuda

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


class _CudaOfCpu(types.ModuleType):
    """Stand-in that modules of `megatron.core` see as `torch.cuda`."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.is_available = lambda: False
        self.current_device = lambda: _CPU
        self.synchronize = self.empty_cache = self.set_device = _do_nothing
        self.memory_allocated = self.max_memory_allocated = self.memory_reserved = lambda *_: 0
        self.manual_seed = torch.manual_seed
        self.get_rng_state = lambda *_: torch.get_rng_state()
        self.set_rng_state = lambda state, *_: torch.set_rng_state(state)

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)


def _do_nothing(*_: object, **__: object) -> None:
    return None


class _CudaWithoutStreams(_CudaOfCpu):
    """The same for modules of experts: they copy counts to the host on a stream of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.Stream = self.Event = self.current_stream = self.stream = lambda *_: _NoStream()


class _NoStream(contextlib.nullcontext[None]):
    """A stream, the block of one, and an event, of a machine without streams."""

    wait_stream = wait_event = synchronize = wait = record = _do_nothing

    def record_event(self, *_: object) -> _NoStream:
        return self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: object, **kwargs: object) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _rebind_rng() -> None:
    random = vars(importlib.import_module("megatron.core.tensor_parallel.random"))
    random["_get_cuda_rng_state"] = lambda *_, **__: torch.get_rng_state()
    random["_set_cuda_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)
    # On a CPU the tracker warns at every fork that the CPU's generator moved: here that is the point.
    logging.getLogger(_RNG_LOGGER).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _rebind_token_counts() -> None:
    """Hand counts of experts' tokens to torch.distributed as numbers; Megatron does so from CUDA alone."""
    dispatcher = vars(importlib.import_module("megatron.core.transformer.moe.token_dispatcher"))
    dispatcher["maybe_move_tensor_to_cpu"] = lambda counts, as_numpy=False, record_stream=False: (
        counts.numpy() if as_numpy and torch.is_tensor(counts) else counts
    )
