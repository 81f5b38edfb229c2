"""Products of float32 matrices on a CPU: by oneDNN where the other library is slower.

torch multiplies float32 by MKL, which takes half of the vector units of processors other than Intel's (AMD
EPYC with AVX-512: 110 of 250 GFLOP/s a core). Owns that choice, which follows from the machine and the shapes
alone: a run is repeated bit by bit. Invariant: the product is the same up to the order of its sums.

Shapes: N rows, K summed, M columns; I inputs and O outputs of a linear layer.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from learner.numerics.autograd import SavedTensors

SMALLEST = 1 << 21
"""Multiplications from which on the call of oneDNN, 10 µs longer, pays."""
PROCESSOR = Path("/proc/cpuinfo")


@functools.cache
def prefers_onednn() -> bool:
    """Whether MKL leaves half of this processor idle."""
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not has_operator or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return PROCESSOR.is_file() and "GenuineIntel" not in PROCESSOR.read_text()


def multiply(left_NK: torch.Tensor, right_KM: torch.Tensor) -> torch.Tensor:
    """Return the product [N, M]; either may be a transposed view. No gradient flows through it."""
    return onednn(left_NK, right_KM) if is_slow(left_NK, right_KM) else left_NK @ right_KM


def onednn(left_NK: torch.Tensor, right_KM: torch.Tensor) -> torch.Tensor:
    """Return the product by oneDNN."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left_NK, right_KM.T, None, "none", [], "")
    return product


def is_slow(left_NK: torch.Tensor, right_KM: torch.Tensor) -> bool:
    """Whether torch's own product of the two is the slower one."""
    if left_NK.device.type != "cpu" or not left_NK.dtype is right_KM.dtype is torch.float32:
        return False
    return left_NK.numel() * right_KM.shape[1] >= SMALLEST and prefers_onednn()


def linear(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`, of any device and number format; a compiler has kernels of its own."""
    if torch.compiler.is_compiling() or not is_slow(x.flatten(0, -2), weight_OI.T):
        return functional.linear(x, weight_OI, bias_O)
    product: torch.Tensor = Linear.apply(x, weight_OI)  # type: ignore[no-untyped-call]
    return product if bias_O is None else product + bias_O


def bind_linear_layers(model: torch.nn.Module) -> None:
    """Have the linear layers of `model` multiply by `linear`."""
    for layer in model.modules():
        if type(layer) is torch.nn.Linear:
            layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, layer.weight, layer.bias)


class Linear(torch.autograd.Function):
    """A linear layer without bias: x [..., I], weight [O, I] -> [..., O]."""

    @staticmethod
    def forward(ctx: SavedTensors, x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight_OI)
        return multiply(x.flatten(0, -2), weight_OI.T).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: SavedTensors, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        gradient_NO = gradient.flatten(0, -2)
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            multiply(gradient_NO, weight_OI).view(x.shape) if needs_x else None,
            multiply(gradient_NO.T, x.flatten(0, -2)) if needs_weight else None,
        )
