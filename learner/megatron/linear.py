"""Products of Megatron's matrices: gradients that go into float32 buffers, and a CPU's faster kernel.

Megatron has the first by a function of Apex for CUDA, and of the second nothing. Owns the names that it
takes from `megatron.core.tensor_parallel.layers`, rebound before a model is made. Invariant: products that
need another rank while they run stay Megatron's own.

Shapes: N positions, I columns in, O out.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Protocol, cast

import megatron.core.tensor_parallel.layers
import torch
from torch.autograd.function import once_differentiable

from learner.numerics.autograd import SavedTensors
from learner.numerics.products import Linear, is_slow, multiply

LAYERS = vars(megatron.core.tensor_parallel.layers)
TRAINED, FROZEN = "linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"
NEED_OTHERS = ("sequence_parallel", "allreduce_dgrad")
Product = Callable[..., torch.Tensor]


def bind_products() -> None:
    """Have Megatron's matrices multiply by the functions of this module. Safe to call twice.

    Without `add_weight_gradient` every gradient is a fresh tensor in the model's number format: a GPU writes
    and reads it once more and rounds it before it is added, and its pages cost a CPU more than the addition.
    """
    LAYERS["fused_weight_gradient_mlp_cuda"] = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient
    )
    LAYERS["_grad_accum_fusion_available"] = True
    for name, ours in ((TRAINED, _TrainedLinear), (FROZEN, Linear)):
        if not isinstance(LAYERS[name], _Choice):
            LAYERS[name] = _Choice(LAYERS[name], ours)


def add_weight_gradient(inputs_NI: torch.Tensor, gradient_NO: torch.Tensor, total_OI: torch.Tensor) -> None:
    """Add gradient.T @ inputs to the float32 `total_OI`."""
    if inputs_NI.device.type == "cpu" and (
        inputs_NI.dtype is not torch.float32 or is_slow(gradient_NO.T, inputs_NI)
    ):
        total_OI.add_(multiply(gradient_NO.T, inputs_NI))
    elif inputs_NI.dtype is torch.float32:
        total_OI.addmm_(gradient_NO.T, inputs_NI)
    else:
        torch.addmm(total_OI, gradient_NO.T, inputs_NI, out_dtype=torch.float32, out=total_OI)


class _Choice:
    """In the place of a function of Megatron's: our product where its own is slow, else its own."""

    warned = False  # Megatron's function reads it by its name

    def __init__(self, megatrons: Product, ours: type[torch.autograd.Function]) -> None:
        self._megatrons, self._ours = megatrons, ours

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None, **options: object
    ) -> torch.Tensor:
        is_local = not any(options[name] for name in NEED_OTHERS)
        if not is_local or not is_slow(x.flatten(0, -2), weight.T):
            return self._megatrons(x, weight, bias=bias, **options)
        product: torch.Tensor = self._ours.apply(x, weight)
        return product if bias is None else product + bias


class _TrainedLinear(Linear):
    """As `Linear`; the weight's gradient goes into the buffer that Megatron has given it."""

    @staticmethod
    @once_differentiable
    def backward(ctx: SavedTensors, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, weight_OI = ctx.saved_tensors
        gradient_NO = gradient.flatten(0, -2)
        x_grad = multiply(gradient_NO, weight_OI).view(x.shape) if ctx.needs_input_grad[0] else None
        trained = cast(_TrainedWeight, weight_OI)
        add_weight_gradient(x.flatten(0, -2), gradient_NO, trained.main_grad)
        trained.grad_added_to_main_grad = True  # its hooks run for a gradient alone, and do not read this one
        return x_grad, torch.empty_like(weight_OI)


class _TrainedWeight(Protocol):
    main_grad: torch.Tensor
    grad_added_to_main_grad: bool
