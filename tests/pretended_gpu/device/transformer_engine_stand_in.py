"""Stand-in for TransformerEngine 2.4 in plain torch: the part that Megatron-core 0.16 makes layers of.

Megatron's own wrappers run on it (`megatron.core.extensions.transformer_engine`). Its classes take arguments
that TransformerEngine's take, no others, and note what they are made with; one rank alone. Must be installed
before Megatron-core is imported.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from typing import Any, Protocol

import torch

from tests.learner.attention import reference
from tests.pretended_gpu.device.tensors import within_kernel

MADE: list[tuple[str, dict[str, Any]]] = []
"""Class and arguments of each layer, in the order in which they were made."""
CALLS: list[dict[str, Any]] = []
"""Arguments of the calls of attention."""


class _Weight(Protocol):
    saved_tensors: tuple[torch.Tensor, torch.Tensor]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _Multiply(torch.autograd.Function):
    """x @ weight.T, whose weight gradient is added to `main_grad`, as with `fuse_wgrad_accumulation`."""

    @staticmethod
    def forward(ctx: _Weight, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: _Weight, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        inputs, outputs = (one.reshape(-1, one.shape[-1]).float() for one in (x, gradient))
        weight.main_grad.addmm_(outputs.T, inputs)  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return gradient @ weight, torch.empty_like(weight)


def _make_weight(*shape: int, device: Any, params_dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(*shape, device=device, dtype=params_dtype))


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        *,
        hidden_size: int,
        eps: float,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: Any,
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        MADE.append(("RMSNorm", {"hidden_size": hidden_size, "eps": eps, "dtype": params_dtype}))
        self.weight, self.eps = _make_weight(hidden_size, device=device, params_dtype=params_dtype), eps
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalise(x, self.weight, self.eps)


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normal = x.float()
    normal = normal * torch.rsqrt(normal.square().mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


class Linear(torch.nn.Module):
    def __init__(
        self,
        *,
        in_features: int,
        out_features: int,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Any,
        init_method: Any,
        bias: bool,
        return_bias: bool,
        parallel_mode: str,
        params_dtype: torch.dtype,
        device: Any,
        rng_tracker_name: Any = None,
    ) -> None:
        super().__init__()
        assert tp_size == 1 and not return_bias
        made = {"shape": (out_features, in_features), "mode": parallel_mode, "dtype": params_dtype}
        name = "LayerNormLinear" if isinstance(self, LayerNormLinear) else "Linear"
        MADE.append((name, {**made, "bias": bias, "fuses": fuse_wgrad_accumulation}))
        self.weight = _make_weight(out_features, in_features, device=device, params_dtype=params_dtype)
        self.bias = _make_weight(out_features, device=device, params_dtype=params_dtype) if bias else None
        self._fuses = fuse_wgrad_accumulation
        for one in self.parameters(recurse=False):
            one.tensor_model_parallel, one.partition_stride = True, 1  # type: ignore[attr-defined]
            one.partition_dim = int(parallel_mode == "row")  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        has_buffer = self._fuses and hasattr(self.weight, "main_grad")
        product: torch.Tensor = _Multiply.apply(x, self.weight) if has_buffer else x @ self.weight.T
        return product if self.bias is None else product + self.bias


class LayerNormLinear(Linear):
    def __init__(
        self,
        *,
        eps: float,
        normalization: str,
        return_layernorm_output: bool,
        zero_centered_gamma: bool,
        ub_name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        assert normalization == "RMSNorm" and not return_layernorm_output and not zero_centered_gamma
        place = {"device": options["device"], "params_dtype": options["params_dtype"]}
        self.layer_norm_weight, self.eps = _make_weight(options["in_features"], **place), eps
        self.layer_norm_weight.sequence_parallel = options["sequence_parallel"]  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return super().forward(_normalise(x, self.layer_norm_weight, self.eps), is_first_microbatch)


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        *,
        num_attention_heads: int,
        kv_channels: int,
        attention_dropout: float,
        attn_mask_type: str,
        sequence_parallel: bool,
        tp_size: int,
        get_rng_state_tracker: Any,
        tp_group: Any,
        layer_number: int,
        num_gqa_groups: int,
        attention_type: str,
        softmax_scale: float | None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0 and tp_size == 1 and attention_type == "self"
        heads = {"heads": num_attention_heads, "groups": num_gqa_groups, "size": kv_channels}
        MADE.append(("DotProductAttention", {**heads, "mask": attn_mask_type, "layer": layer_number}))
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        attn_mask_type: str,
        qkv_format: str,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        cu_seqlens_q_padded: None = None,
        cu_seqlens_kv_padded: None = None,
    ) -> torch.Tensor:
        assert attention_mask is cu_seqlens_q_padded is cu_seqlens_kv_padded is None
        CALLS.append({"format": qkv_format, "mask": attn_mask_type, "dtype": query.dtype})
        lengths = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        options: dict[str, Any] = {"scale": self._scale, "window_size": (-1, 0), "enable_gqa": True}
        with within_kernel():
            return reference.varlen_attn(query, key, value, *lengths, **options).flatten(1)


def _module(name: str, **contents: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    made.__dict__.update(contents)
    sys.modules[name] = made
    parent, _, inner = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], inner, made)
    return made


class _Unused:
    """A class that Megatron-core derives from or names, and that no layer here is made of."""


def install() -> None:
    """Have `import transformer_engine` find this module's classes."""
    layers = {one.__name__: one for one in (RMSNorm, Linear, LayerNormLinear, DotProductAttention)}
    _module("transformer_engine", __version__="2.4.0")
    _module("transformer_engine.common")
    _module("transformer_engine.common.recipe", DelayedScaling=_Unused)
    grouped = type("GroupedLinear", (torch.nn.Module,), {})
    _module("transformer_engine.pytorch", **layers, GroupedLinear=grouped)
    off = {"is_fp8_enabled": staticmethod(lambda: False)}
    manager = type("FP8GlobalStateManager", (), off)
    fp8 = {"FP8GlobalStateManager": manager, "fp8_autocast": contextlib.nullcontext}
    _module("transformer_engine.pytorch.fp8", **fp8)
    tracker = {"CudaRNGStatesTracker": _Unused, "activation_recompute_forward": contextlib.nullcontext}
    _module("transformer_engine.pytorch.distributed", **tracker, checkpoint=None)
    _module("transformer_engine.pytorch.tensor", QuantizedTensor=_Unused)
    _module("transformer_engine.pytorch.float8_tensor", Float8Tensor=_Unused)
    _module("transformer_engine.pytorch.ops", Sequential=_Unused, FusibleOperation=_Unused)
    _module("transformer_engine.pytorch.module")
    _module("transformer_engine.pytorch.module.base", get_dummy_wgrad=_make_dummy)


def _make_dummy(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")
